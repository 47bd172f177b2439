//! Debug information that is read with a bound on what its reader makes of it.
//!
//! `addr2line` turns a byte of a line table into a row of 24, and a byte of a list of files into 130, and several units may name the same
//! table. A small hostile file can thus become any amount of memory and work. Here, each read is paid for from a [`Meter`]. Once that is
//! empty, every read fails as at the end of a section.

use addr2line::gimli::{EndianSlice, Error, Reader, ReaderOffsetId, RunTimeEndian, SectionId};
use std::borrow::Cow;
use std::cell::Cell;
use std::fmt;

/// Bytes of memory that a read may become, about: of an abbreviation or a range (gimli 0.34, addr2line 0.27; vectors double).
const SMALLEST: u64 = 48;
/// A function, by two reads (`Function`, `FunctionAddress`).
const OF_INFO: u64 = 2 * SMALLEST;
/// A file's name in a line table, by one (`FileEntry`, `String`).
const OF_LINES: u64 = 7 * SMALLEST;
/// Bytes of memory that one reading of an object's debug information may become, about. A unit of a million rows needs half of it.
const MOST_MEMORY: u64 = 1 << 30;

/// What is left to be read.
pub(crate) struct Meter {
    left: Cell<u64>,
    is_over: Cell<bool>,
}

impl Default for Meter {
    fn default() -> Meter {
        Meter { left: Cell::new(MOST_MEMORY), is_over: Cell::new(false) }
    }
}

impl Meter {
    /// Whether more was wanted than there was: what was not read may have had an answer.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.get()
    }

    /// These bytes of a section, to be read at this meter's cost.
    pub(crate) fn read<'a>(
        &'a self,
        section: SectionId,
        bytes: &'a [u8],
        endian: RunTimeEndian,
    ) -> Metered<'a> {
        let cost = match section {
            SectionId::DebugLine => OF_LINES,
            SectionId::DebugInfo => OF_INFO,
            _ => SMALLEST,
        };
        Metered { bytes, meter: self, endian, cost: cost as u16 }
    }

    fn take(&self, bytes: u64) -> bool {
        let left = self.left.get().checked_sub(bytes);
        self.left.set(left.unwrap_or(0));
        self.is_over.set(self.is_over.get() || left.is_none());
        left.is_some()
    }
}

/// Bytes of a section.
#[derive(Clone, Copy)]
pub(crate) struct Metered<'a> {
    bytes: &'a [u8],
    meter: &'a Meter,
    endian: RunTimeEndian,
    /// Of a read.
    cost: u16,
}

impl<'a> Metered<'a> {
    fn slice(&self) -> EndianSlice<'a, RunTimeEndian> {
        EndianSlice::new(self.bytes, self.endian)
    }

    fn pay(&self, more: usize) -> Result<(), Error> {
        match self.meter.take(u64::from(self.cost) + more as u64) {
            true => Ok(()),
            false => Err(Error::UnexpectedEof(self.slice().offset_id())),
        }
    }
}

impl fmt::Debug for Metered<'_> {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.slice().fmt(to)
    }
}

impl Reader for Metered<'_> {
    type Endian = RunTimeEndian;
    type Offset = usize;

    fn endian(&self) -> RunTimeEndian {
        self.endian
    }

    fn len(&self) -> usize {
        self.bytes.len()
    }

    fn empty(&mut self) {
        self.bytes = &[];
    }

    fn truncate(&mut self, len: usize) -> Result<(), Error> {
        let mut slice = self.slice();
        slice.truncate(len)?;
        self.bytes = slice.slice();
        Ok(())
    }

    fn offset_from(&self, base: &Self) -> usize {
        self.slice().offset_from(base.slice())
    }

    fn offset_id(&self) -> ReaderOffsetId {
        self.slice().offset_id()
    }

    fn lookup_offset_id(&self, id: ReaderOffsetId) -> Option<usize> {
        self.slice().lookup_offset_id(id)
    }

    fn find(&self, byte: u8) -> Result<usize, Error> {
        let found = Reader::find(&self.slice(), byte);
        // What is looked through takes time.
        self.pay(*found.as_ref().unwrap_or(&self.bytes.len()))?;
        found
    }

    fn skip(&mut self, len: usize) -> Result<(), Error> {
        self.split(len).map(drop)
    }

    fn split(&mut self, len: usize) -> Result<Self, Error> {
        self.pay(0)?;
        let eof = Error::UnexpectedEof(self.slice().offset_id());
        let (first, rest) = self.bytes.split_at_checked(len).ok_or(eof)?;
        self.bytes = rest;
        Ok(Metered { bytes: first, ..*self })
    }

    fn to_slice(&self) -> Result<Cow<'_, [u8]>, Error> {
        self.pay(self.bytes.len())?;
        Ok(self.bytes.into())
    }

    // Names are copied, each as often as something names it.
    fn to_string(&self) -> Result<Cow<'_, str>, Error> {
        self.pay(self.bytes.len())?;
        std::str::from_utf8(self.bytes).map(Into::into).map_err(|_| Error::BadUtf8)
    }

    fn to_string_lossy(&self) -> Result<Cow<'_, str>, Error> {
        self.pay(self.bytes.len())?;
        Ok(String::from_utf8_lossy(self.bytes))
    }

    fn read_slice(&mut self, to: &mut [u8]) -> Result<(), Error> {
        let read = self.split(to.len())?;
        to.copy_from_slice(read.bytes);
        Ok(())
    }

    fn read_u8(&mut self) -> Result<u8, Error> {
        self.pay(0)?;
        let eof = Error::UnexpectedEof(self.slice().offset_id());
        let (first, rest) = self.bytes.split_first().ok_or(eof)?;
        self.bytes = rest;
        Ok(*first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_is_paid_for_and_an_empty_meter_gives_nothing() {
        let meter = Meter::default();
        let bytes = [7; 64];
        let mut read = meter.read(SectionId::DebugLine, &bytes, RunTimeEndian::Little);
        assert_eq!((read.read_u8(), read.read_u16(), read.len()), (Ok(7), Ok(0x707), 61));
        assert!(MOST_MEMORY - meter.left.get() == 2 * OF_LINES && !meter.is_over());
        assert!(read.read_slice(&mut [0; 62]).is_err());
        assert!(!meter.is_over(), "the section ended, not the meter");
        // The same bytes, however often they are named, become no more than was allowed.
        let n = (0..).take_while(|_| read.clone().read_u8().is_ok()).count() as u64;
        assert!(meter.is_over() && n <= MOST_MEMORY / OF_LINES);
        assert!(read.to_string().is_err() && read.split(1).is_err());
    }
}

//! Bytes of a file into payloads, and payloads of events into events.

use std::io::{self, Read, SeekFrom};

use super::{Block, Source};
use crate::block::{CODEC_ZSTD, HEADER_BYTES, Header, Kind, MAX_EVENTS};
use crate::codec::Decompressor;
use crate::columns;
use crate::event::Event;

/// Buffers that grew beyond this for one block are given back after it.
const MOST_KEPT: usize = 8 << 20;

/// The file, and memory that every block needs again.
pub(super) struct Input {
    pub(super) source: Box<dyn Source>,
    pub(super) stored: Vec<u8>,
    pub(super) unfolder: Unfolder,
}

/// Makes payloads of what is stored, and events of those.
pub(super) struct Unfolder {
    pub(super) payload: Vec<u8>,
    decompressor: Decompressor,
    pub(super) scratch: columns::Scratch,
}

impl Input {
    pub(super) fn new(source: Box<dyn Source>) -> io::Result<Input> {
        Ok(Input { source, stored: Vec::new(), unfolder: Unfolder::new()? })
    }

    /// Reads one block, and leaves its payload in `payload`.
    pub(super) fn load(&mut self, block: &Block) -> Result<Header, String> {
        let mut stored = std::mem::take(&mut self.stored);
        let header = self.fetch(block, &mut stored);
        let unfolded = header.and_then(|header| self.unfolder.unfold(&header, &stored).map(|()| header));
        self.stored = stored;
        unfolded
    }

    /// Reads one block as it is stored.
    pub(super) fn fetch(&mut self, block: &Block, stored: &mut Vec<u8>) -> Result<Header, String> {
        let header = self.load_header(block)?;
        let at = block.offset + HEADER_BYTES as u64;
        stored.clear();
        self.source.seek(SeekFrom::Start(at)).map_err(|error| error.to_string())?;
        // Grows with what is really there, whatever the header says.
        let read = (&mut self.source).take(u64::from(header.stored)).read_to_end(stored);
        read.map_err(|error| error.to_string())?;
        if stored.len() != header.stored as usize {
            return Err(format!("{} bytes of payload, but {} were written", stored.len(), header.stored));
        }
        Ok(header)
    }

    fn load_header(&mut self, block: &Block) -> Result<Header, String> {
        let mut header = [0; HEADER_BYTES];
        let read =
            self.source.seek(SeekFrom::Start(block.offset)).and_then(|_| self.source.read_exact(&mut header));
        read.map_err(|error| error.to_string())?;
        let header =
            Header::decode(&header).map_err(|why| format!("the block header is unreadable ({why:?})"))?;
        let is_events = [Kind::Events as u8, Kind::Held as u8].contains(&header.kind);
        if header.kind != block.kind || (is_events && header.count != block.count) {
            return Err("the block is not the one in the index".to_owned());
        }
        if header.codec != CODEC_ZSTD {
            return Err(format!("compressed by method {}, which this version does not know", header.codec));
        }
        if is_events && header.count > MAX_EVENTS {
            return Err(format!(
                "{} events in one block, and no more than {MAX_EVENTS} are allowed",
                header.count
            ));
        }
        Ok(header)
    }

    pub(super) fn shrink(&mut self) {
        shrink(&mut self.stored);
        shrink(&mut self.unfolder.payload);
    }
}

/// Gives back a buffer that one block made large.
pub(super) fn shrink(buffer: &mut Vec<u8>) {
    if buffer.capacity() > MOST_KEPT {
        *buffer = Vec::new();
    }
}

impl Unfolder {
    pub(super) fn new() -> io::Result<Unfolder> {
        Ok(Unfolder {
            payload: Vec::new(),
            decompressor: Decompressor::new()?,
            scratch: columns::Scratch::default(),
        })
    }

    /// Leaves the payload of what is stored in `payload`.
    pub(super) fn unfold(&mut self, header: &Header, stored: &[u8]) -> Result<(), String> {
        if crc32fast::hash(stored) != header.crc {
            return Err("the checksum of the payload differs".to_owned());
        }
        // The header's length is at most MAX_RAW; a payload that unfolds to more is refused by the decompressor.
        self.payload.clear();
        self.payload.reserve(header.raw as usize);
        let unfolded = self.decompressor.decompress_to_buffer(stored, &mut self.payload);
        let unfolded = unfolded.map_err(|error| error.to_string())?;
        if unfolded != header.raw as usize {
            return Err(format!("the payload decompresses to {unfolded} bytes instead of {}", header.raw));
        }
        Ok(())
    }

    /// The events of a block as it is stored, added to an empty list in the order of their times; after an error the list is empty.
    pub(super) fn events(
        &mut self,
        header: &Header,
        stored: &[u8],
        events: &mut Vec<Event>,
    ) -> Result<(), String> {
        let unfolded = self.unfold(header, stored);
        let Unfolder { payload, scratch, .. } = self;
        let decoded = unfolded.and_then(|()| columns::decode(payload, header.count, scratch, events));
        shrink(payload);
        in_order(events, decoded)
    }
}

/// Orders the events of a block by their times, where they were not stored in that order; after an error the list is empty.
pub(super) fn in_order(events: &mut Vec<Event>, is_sorted: Result<bool, String>) -> Result<(), String> {
    match is_sorted {
        Ok(true) => {}
        Ok(false) => events.sort_by_key(|event| event.time),
        Err(_) => events.clear(),
    }
    is_sorted.map(|_| ())
}

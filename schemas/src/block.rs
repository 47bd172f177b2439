//! The bytes around the payloads: file header, block headers, footer. FORMAT.md describes them.

/// First bytes of a trace; the last one is the format's version.
pub(crate) const FILE_MAGIC: [u8; 8] = *b"GPUTRC\0\x01";
/// First bytes of a block header.
pub(crate) const BLOCK_MAGIC: [u8; 4] = *b"GTB\x01";
/// Last bytes of a finished trace.
pub(crate) const FOOTER_MAGIC: [u8; 8] = *b"GPUTREND";
/// Bytes of a [`Header`].
pub(crate) const HEADER_BYTES: usize = 64;
/// Bytes of a [`Footer`].
pub(crate) const FOOTER_BYTES: usize = 32;
/// Longest payload before compression. Checked before anything is allocated, so that a small hostile file cannot ask
/// for the machine's memory.
pub(crate) const MAX_RAW: u32 = 64 << 20;
/// Longest payload as stored: zstd's own bound on what it makes of [`MAX_RAW`] incompressible bytes, rounded up.
pub(crate) const MAX_STORED: u32 = MAX_RAW + (1 << 20);
/// Most events in a block.
pub(crate) const MAX_EVENTS: u32 = 1 << 16;

/// What a block's payload is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Kind {
    Definitions = 1,
    Events = 2,
    Mappings = 3,
    Index = 4,
    Held = 5,
}

impl Kind {
    pub(crate) fn from_u8(raw: u8) -> Option<Kind> {
        [Kind::Definitions, Kind::Events, Kind::Mappings, Kind::Index, Kind::Held]
            .into_iter()
            .find(|kind| *kind as u8 == raw)
    }
}

/// How a payload is stored.
pub(crate) const CODEC_ZSTD: u8 = 1;

/// What stands before each payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Header {
    /// [`Kind`], or one of a later version.
    pub(crate) kind: u8,
    /// [`CODEC_ZSTD`].
    pub(crate) codec: u8,
    /// Events, definitions, moments or blocks in the payload.
    pub(crate) count: u32,
    /// Payload bytes before compression.
    pub(crate) raw: u32,
    /// Payload bytes in the file.
    pub(crate) stored: u32,
    /// CRC-32 (IEEE) of the payload in the file.
    pub(crate) crc: u32,
    /// Blocks before this one.
    pub(crate) sequence: u64,
    /// Earliest time in the payload.
    pub(crate) first: u64,
    /// Latest time in the payload.
    pub(crate) last: u64,
}

/// Why 64 bytes are no block header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NotAHeader {
    /// Other bytes than the magic.
    Magic,
    /// The header's own checksum.
    Checksum,
    /// Lengths beyond [`MAX_RAW`] or [`MAX_STORED`].
    Length,
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend_from_slice(&BLOCK_MAGIC);
        bytes.extend_from_slice(&[self.kind, self.codec, HEADER_BYTES as u8, 0]);
        for word in [self.count, self.raw, self.stored, self.crc] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        for word in [self.sequence, self.first, self.last] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.resize(HEADER_BYTES - 4, 0);
        bytes.extend_from_slice(&crc32fast::hash(&bytes).to_le_bytes());
        let mut header = [0; HEADER_BYTES];
        header.copy_from_slice(&bytes);
        header
    }

    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, NotAHeader> {
        if bytes[..4] != BLOCK_MAGIC {
            return Err(NotAHeader::Magic);
        }
        if u32_at(bytes, HEADER_BYTES - 4) != crc32fast::hash(&bytes[..HEADER_BYTES - 4]) {
            return Err(NotAHeader::Checksum);
        }
        let header = Header {
            kind: bytes[4],
            codec: bytes[5],
            count: u32_at(bytes, 8),
            raw: u32_at(bytes, 12),
            stored: u32_at(bytes, 16),
            crc: u32_at(bytes, 20),
            sequence: u64_at(bytes, 24),
            first: u64_at(bytes, 32),
            last: u64_at(bytes, 40),
        };
        if header.raw > MAX_RAW || header.stored > MAX_STORED {
            return Err(NotAHeader::Length);
        }
        Ok(header)
    }

    /// Bytes of the whole block.
    pub(crate) fn block_bytes(&self) -> u64 {
        HEADER_BYTES as u64 + u64::from(self.stored)
    }
}

/// What ends a finished trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Footer {
    /// Where the index block starts.
    pub(crate) index: u64,
    /// Events in the file.
    pub(crate) events: u64,
}

impl Footer {
    pub(crate) fn encode(&self) -> [u8; FOOTER_BYTES] {
        let mut footer = [0; FOOTER_BYTES];
        footer[..8].copy_from_slice(&self.index.to_le_bytes());
        footer[8..16].copy_from_slice(&self.events.to_le_bytes());
        let crc = crc32fast::hash(&footer[..20]);
        footer[20..24].copy_from_slice(&crc.to_le_bytes());
        footer[24..].copy_from_slice(&FOOTER_MAGIC);
        footer
    }

    pub(crate) fn decode(bytes: &[u8; FOOTER_BYTES]) -> Option<Footer> {
        let whole = bytes[24..] == FOOTER_MAGIC && u32_at(bytes, 20) == crc32fast::hash(&bytes[..20]);
        whole.then(|| Footer { index: u64_at(bytes, 0), events: u64_at(bytes, 8) })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|word| word.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// A signed difference as a small number.
pub(crate) fn zigzag(value: u64, before: u64) -> u64 {
    let difference = value.wrapping_sub(before) as i64;
    (difference << 1 ^ difference >> 63) as u64
}

/// The reverse of [`zigzag`].
pub(crate) fn unzigzag(stored: u64, before: u64) -> u64 {
    let difference = (stored >> 1) as i64 ^ -((stored & 1) as i64);
    before.wrapping_add(difference as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zigzag_gives_back_every_pair() {
        for pair in
            [(0, 0), (1, 0), (0, 1), (u64::MAX, 0), (0, u64::MAX), (1 << 63, 0), (5, 7), (u64::MAX, 1 << 63)]
        {
            assert_eq!(unzigzag(zigzag(pair.0, pair.1), pair.1), pair.0, "{pair:?}");
        }
        assert_eq!((zigzag(7, 8), zigzag(9, 8)), (1, 2), "small differences are small numbers");
    }

    #[test]
    fn headers_and_footers_come_back_and_no_bit_of_them_can_flip_unseen() {
        let header = Header {
            kind: 2,
            codec: CODEC_ZSTD,
            count: 3,
            raw: 4,
            stored: 5,
            crc: 6,
            sequence: 7,
            first: 8,
            last: 9,
        };
        assert_eq!(Header::decode(&header.encode()), Ok(header));
        for bit in 0..HEADER_BYTES * 8 {
            let mut bytes = header.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bytes).is_err(), "bit {bit}");
        }
        let footer = Footer { index: 1 << 40, events: 12 };
        assert_eq!(Footer::decode(&footer.encode()), Some(footer));
        for bit in 0..FOOTER_BYTES * 8 {
            let mut bytes = footer.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Footer::decode(&bytes), None, "bit {bit}");
        }
    }
}

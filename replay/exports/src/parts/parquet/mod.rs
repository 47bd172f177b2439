//! Apache Parquet, as far as tables of integers and texts need it. What is written is read by everything that reads Parquet;
//! what is read is what was written here.

pub mod read;
pub mod write;

const MAGIC: &[u8] = b"PAR1";

/// `Type`.
const INT64: i64 = 2;
const BYTE_ARRAY: i64 = 6;
/// `ConvertedType`.
const UTF8: i64 = 0;
const UINT_64: i64 = 14;
/// `FieldRepetitionType`.
const OPTIONAL: i64 = 1;
/// `Encoding`.
const PLAIN: i64 = 0;
const RLE: i64 = 3;
const RLE_DICTIONARY: i64 = 8;
/// `CompressionCodec`.
const ZSTD: i64 = 6;
/// `PageType`.
const DATA_PAGE: i64 = 0;
const DICTIONARY_PAGE: i64 = 2;

//! What was sent of a file, as it is kept beside it. The folder may be one that others write to as well, so that nothing in it is
//! believed before it is checked.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Bytes of each part of an upload: above the 5 MiB that S3 asks of a part that is not the last
/// (docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html, 2026), and the same for all, as R2 asks.
pub const PART_BYTES: u64 = 8 << 20;
/// Parts that S3 takes of an object (the same page).
pub(crate) const MOST_PARTS: usize = 10_000;
/// Longest name of a part or an upload, in bytes. S3's are 34 and about 200 bytes long, Azure's 88.
const LONGEST_NAME: usize = 4 << 10;
/// Longest URL, in bytes: keys have at most 1,024, each written as `%XX`, and there is a host before them.
const LONGEST_URL: usize = 8 << 10;
/// Most bytes of a kept state: one with [`MOST_PARTS`] parts of S3 has 0.6 MB, of Azure 1.2 MB.
pub(crate) const MOST_STATE: u64 = 8 << 20;

/// The parts of a file that were sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// What this is: `gputrace.upload/1`.
    schema: String,
    /// The destination of the file.
    pub url: String,
    /// What the store calls the upload.
    pub(crate) id: String,
    /// Bytes of each part.
    part_bytes: u64,
    /// What the store calls each part, and the CRC-32 of its bytes.
    pub(crate) parts: Vec<(String, u32)>,
}

const SCHEMA: &str = "gputrace.upload/1";

/// Why a kept state is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unusable(String);

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Unusable {
    pub(crate) fn new(why: impl Into<String>) -> Unusable {
        Unusable(why.into())
    }
}

impl State {
    /// One of which nothing was sent yet.
    pub(crate) fn new(url: String, id: String) -> State {
        State { schema: SCHEMA.to_owned(), url, id, part_bytes: PART_BYTES, parts: vec![] }
    }

    /// Reads what was kept.
    ///
    /// # Errors
    /// It is damaged, of another version, or says what no upload of ours could have come to.
    pub fn parse(bytes: &[u8]) -> Result<State, Unusable> {
        if bytes.len() as u64 > MOST_STATE {
            return Err(Unusable::new(format!("it is longer than {MOST_STATE} bytes")));
        }
        let state: State = serde_json::from_slice(bytes)
            .map_err(|error| Unusable::new(format!("it is damaged: {error}")))?;
        let is_name = |name: &str| {
            !name.is_empty() && name.len() <= LONGEST_NAME && name.bytes().all(|it| it.is_ascii_graphic())
        };
        if state.schema != SCHEMA || state.part_bytes != PART_BYTES {
            return Err(Unusable::new("another version of gputrace made it"));
        }
        if state.url.len() > LONGEST_URL || !is_name(&state.id) {
            return Err(Unusable::new("it is damaged: no store names an upload like that"));
        }
        if state.parts.len() > MOST_PARTS || !state.parts.iter().all(|(name, _)| is_name(name)) {
            return Err(Unusable::new("it is damaged: no store names parts like that, or so many"));
        }
        Ok(state)
    }

    /// As it is kept.
    pub(crate) fn bytes(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(self)
    }

    /// Bytes that were sent.
    #[must_use]
    pub fn sent(&self) -> u64 {
        PART_BYTES * self.parts.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(part_bytes: &str, parts: &str) -> Result<State, Unusable> {
        let text = format!(
            r#"{{"schema":"gputrace.upload/1","url":"s3://b/k","id":"u","part_bytes":{part_bytes},"parts":[{parts}]}}"#
        );
        State::parse(text.as_bytes())
    }

    #[test]
    fn what_was_kept_is_read_again() {
        let mut state = State::new("s3://b/k".to_owned(), "u".to_owned());
        state.parts = vec![("\"etag\"".to_owned(), 7); 3];
        assert_eq!(State::parse(&state.bytes().unwrap()), Ok(state.clone()));
        assert_eq!(state.sent(), 3 * PART_BYTES);
    }

    #[test]
    fn what_no_upload_comes_to_is_not_believed() {
        let own = PART_BYTES.to_string();
        assert!(kept(&own, r#"["a",1]"#).is_ok());
        let long = "x".repeat(LONGEST_NAME + 1);
        let many = vec![r#"["a",1]"#; MOST_PARTS + 1].join(",");
        for (part_bytes, parts, says) in [
            ("18446744073709551615", r#"["a",1]"#, "another version"),
            ("0", r#"["a",1]"#, "another version"),
            ("1", r#"["a",1]"#, "another version"),
            ("-1", r#"["a",1]"#, "damaged"),
            ("1e999", r#"["a",1]"#, "damaged"),
            (&own, r#"["a",-1]"#, "damaged"),
            (&own, r#"["a",4294967296]"#, "damaged"),
            (&own, r#"["",1]"#, "names parts"),
            (&own, r#"["a\r\nX: b",1]"#, "names parts"),
            (&own, &format!(r#"["{long}",1]"#), "names parts"),
            (&own, &many, "so many"),
        ] {
            let why = kept(part_bytes, parts).expect_err(says).to_string();
            assert!(why.contains(says), "{part_bytes}: {why}");
        }
        for text in ["", "null", "[]", "{}", "[[[[[", &"[".repeat(100_000)] {
            assert!(State::parse(text.as_bytes()).is_err());
        }
        assert!(State::parse(&vec![b' '; usize::try_from(MOST_STATE).unwrap() + 1]).is_err());
    }
}

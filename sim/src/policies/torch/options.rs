//! `PYTORCH_CUDA_ALLOC_CONF`, read as a given PyTorch release reads it, with that release's refusals.

use super::profile::Profile;
use crate::policies::{OptionError, meant};

const MIB: u64 = 1 << 20;

/// 20 MiB: kLargeBuffer, and the default of `large_segment_size_mb` and `max_non_split_rounding_mb`.
pub const LARGE_SEGMENT: u64 = 20 * MIB;

/// The allocator settings that change what the allocator does.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Blocks of at least this many bytes are neither split nor used for smaller requests.
    pub max_split: u64,
    /// How much larger than the request an unsplittable block may be, bytes.
    pub max_non_split_rounding: u64,
    /// Divisions of each power of two, from 1 MiB (and below) to 32 GiB (and above); 0 and 1 mean none.
    pub roundup_divisions: [u64; 16],
    /// Fraction of the limit above which old cached segments are freed; 0 for never.
    pub gc_threshold: f64,
    /// Segments that grow by mapping pages.
    pub expandable_segments: bool,
    /// Segment size for requests from 1 to 10 MiB, and page size of expandable segments, bytes.
    pub large_segment: u64,
    /// `per_process_memory_fraction`; 1.0 for no limit.
    pub memory_fraction: f64,
    /// Refuse before asking the driver for more than the device has.
    pub throw_on_cudamalloc_oom: bool,
    /// How much address space an expandable segment reserves, where it is not an eighth more than the device has.
    pub expandable_reserve: Option<Reserve>,
}

/// `expandable_segments_reserve`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reserve {
    /// Of the device's memory.
    Fraction(f64),
    /// GiB.
    Gib(f64),
}

impl Reserve {
    /// Bytes on a device of `total` bytes. A request for more does not fit into any segment.
    pub(super) fn bytes(self, total: u64) -> u64 {
        match self {
            Reserve::Fraction(fraction) => (fraction * total as f64) as u64,
            Reserve::Gib(gib) => (gib * (1u64 << 30) as f64) as u64,
        }
    }
}

impl Default for Options {
    fn default() -> Options {
        Options {
            max_split: u64::MAX,
            max_non_split_rounding: LARGE_SEGMENT,
            roundup_divisions: [0; 16],
            gc_threshold: 0.0,
            expandable_segments: false,
            large_segment: LARGE_SEGMENT,
            memory_fraction: 1.0,
            throw_on_cudamalloc_oom: false,
            expandable_reserve: None,
        }
    }
}

/// How a key's value is read.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    MaxSplit,
    MaxNonSplitRounding,
    Roundup,
    GcThreshold,
    Expandable,
    LargeSegment,
    Fraction,
    ThrowOnOom,
    Backend,
    /// A boolean that does not change what is allocated where.
    OtherBool,
    /// A number that concerns pinned host memory.
    OtherNumber,
    Reserve,
    /// Reserves of streams that C++ code has tagged with a class: no trace tells which, so none is taken for tagged.
    ReserveByClass,
}

/// Key, first minor release of 2.x that knows it, and how its value is read.
const KEYS: &[(&str, u8, Kind)] = &[
    ("backend", 0, Kind::Backend),
    ("expandable_segments", 1, Kind::Expandable),
    ("expandable_segments_reserve", 15, Kind::Reserve),
    ("expandable_segments_reserve_by_class", 15, Kind::ReserveByClass),
    ("garbage_collection_threshold", 0, Kind::GcThreshold),
    ("graph_capture_record_stream_reuse", 9, Kind::OtherBool),
    ("large_segment_size_mb", 11, Kind::LargeSegment),
    ("max_non_split_rounding_mb", 6, Kind::MaxNonSplitRounding),
    ("max_split_size_mb", 0, Kind::MaxSplit),
    ("per_process_memory_fraction", 10, Kind::Fraction),
    ("pinned_free_catch_all", 12, Kind::OtherBool),
    ("pinned_max_cached_size_mb", 13, Kind::OtherNumber),
    ("pinned_max_round_threshold_mb", 13, Kind::OtherNumber),
    ("pinned_num_register_threads", 2, Kind::OtherNumber),
    ("pinned_reserve_segment_size_mb", 10, Kind::OtherNumber),
    ("pinned_use_background_threads", 6, Kind::OtherBool),
    ("pinned_use_cuda_host_register", 2, Kind::OtherBool),
    ("pinned_use_hip_host_register", 2, Kind::OtherBool),
    ("release_lock_on_cudamalloc", 2, Kind::OtherBool),
    ("release_lock_on_hipmalloc", 2, Kind::OtherBool),
    ("roundup_power2_divisions", 0, Kind::Roundup),
    ("throw_on_cudamalloc_oom", 12, Kind::ThrowOnOom),
];

/// Every key that some release knows, with a value that all that know it accept.
#[cfg(test)]
pub(super) fn examples() -> impl Iterator<Item = String> {
    KEYS.iter().map(|(key, _, kind)| {
        let value = match kind {
            Kind::MaxSplit | Kind::MaxNonSplitRounding | Kind::LargeSegment => "40",
            Kind::Roundup => "[256:4]",
            Kind::GcThreshold | Kind::Fraction | Kind::Reserve => "0.5",
            Kind::Expandable | Kind::ThrowOnOom | Kind::OtherBool => "True",
            Kind::ReserveByClass => "[a:0.5]",
            Kind::Backend => "native",
            Kind::OtherNumber => "8",
        };
        format!("{key}:{value}")
    })
}

/// Reads an option string as `profile` reads it.
///
/// # Errors
/// What that release refuses at start-up: unknown keys, values out of range, broken grammar.
pub fn parse(text: &str, profile: &Profile) -> Result<Options, OptionError> {
    let mut tokens = Tokens { tokens: lex(text), at: 0, profile };
    let mut options = Options::default();
    let mut max_split_mb = None;
    let mut non_split_mb = None;
    while let Some(key) = tokens.next() {
        if key == "," {
            continue;
        }
        let kind = tokens.kind(&key)?;
        tokens.expect(":", &key)?;
        match kind {
            Kind::MaxSplit => max_split_mb = Some(tokens.number(&key)?),
            Kind::MaxNonSplitRounding => non_split_mb = Some(tokens.number(&key)?),
            Kind::Roundup => options.roundup_divisions = tokens.roundup(&key)?,
            Kind::GcThreshold => options.gc_threshold = tokens.fraction(&key, true)?,
            Kind::Expandable => options.expandable_segments = tokens.boolean(&key)?,
            Kind::LargeSegment => {
                let mb = tokens.number(&key)?;
                if mb <= 10 {
                    return Err(tokens.refuse(&key, "must be more than 10"));
                }
                options.large_segment = mb.saturating_mul(MIB);
            }
            Kind::Fraction => options.memory_fraction = tokens.fraction(&key, false)?,
            Kind::ThrowOnOom => options.throw_on_cudamalloc_oom = tokens.boolean(&key)?,
            Kind::Backend => {
                let backend = tokens.word(&key)?;
                if backend != "native" {
                    return Err(OptionError(format!(
                        "backend:{backend} is another allocator: use --policy cuda_async"
                    )));
                }
            }
            Kind::OtherBool => {
                tokens.boolean(&key)?;
            }
            Kind::OtherNumber => {
                tokens.number(&key)?;
            }
            Kind::Reserve => options.expandable_reserve = reserve(&tokens.word(&key)?),
            Kind::ReserveByClass => tokens.skip_list(&key)?,
        }
        match tokens.next() {
            None => break,
            Some(comma) if comma == "," => {}
            Some(other) => {
                return Err(OptionError(format!("`{other}` after the value of {key}: expected a comma")));
            }
        }
    }
    if let Some(mb) = max_split_mb {
        options.max_split = tokens.at_least_a_segment("max_split_size_mb", mb, options.large_segment)?;
    }
    if let Some(mb) = non_split_mb {
        options.max_non_split_rounding =
            tokens.at_least_a_segment("max_non_split_rounding_mb", mb, options.large_segment)?;
    }
    Ok(options)
}

/// A fraction such as 0.5 or an absolute size such as 40G. PyTorch ignores anything else, with a warning.
fn reserve(word: &str) -> Option<Reserve> {
    let (number, is_absolute) = match word.strip_suffix('G') {
        Some(number) => (number, true),
        None => (word, false),
    };
    let value: f64 = number.parse().ok().filter(|value: &f64| value.is_finite() && *value > 0.0)?;
    Some(if is_absolute { Reserve::Gib(value) } else { Reserve::Fraction(value) })
}

/// Words and the separators `, : [ ]`; blanks are ignored.
fn lex(text: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut word = String::new();
    for letter in text.chars() {
        if matches!(letter, ',' | ':' | '[' | ']') {
            if !word.is_empty() {
                tokens.push(std::mem::take(&mut word));
            }
            tokens.push(letter.to_string());
        } else if !letter.is_whitespace() {
            word.push(letter);
        }
    }
    if !word.is_empty() {
        tokens.push(word);
    }
    tokens
}

struct Tokens<'a> {
    tokens: Vec<String>,
    at: usize,
    profile: &'a Profile,
}

impl Tokens<'_> {
    fn next(&mut self) -> Option<String> {
        let token = self.tokens.get(self.at).cloned();
        self.at += 1;
        token
    }

    fn peek(&self) -> Option<&str> {
        self.tokens.get(self.at).map(String::as_str)
    }

    fn release(&self) -> String {
        format!("PyTorch {}.{}", self.profile.version.0, self.profile.version.1)
    }

    fn refuse(&self, key: &str, rule: &str) -> OptionError {
        OptionError(format!("{key} {rule}: {} refuses it at start-up", self.release()))
    }

    fn kind(&self, key: &str) -> Result<Kind, OptionError> {
        let Some((_, since, kind)) = KEYS.iter().find(|(name, _, _)| *name == key) else {
            let known: Vec<&str> = KEYS
                .iter()
                .filter(|(_, since, _)| *since <= self.profile.version.1)
                .map(|(name, _, _)| *name)
                .collect();
            return Err(OptionError(format!(
                "{} has no allocator option `{key}`{}; it knows {}",
                self.release(),
                meant(key, &known),
                known.join(", ")
            )));
        };
        if *since > self.profile.version.1 {
            return Err(OptionError(format!(
                "{} does not know {key}, which came with 2.{since}, and refuses to start",
                self.release()
            )));
        }
        Ok(*kind)
    }

    fn expect(&mut self, separator: &str, key: &str) -> Result<(), OptionError> {
        match self.next() {
            Some(token) if token == separator => Ok(()),
            Some(token) => Err(OptionError(format!("`{token}` after {key}: expected `{separator}`"))),
            None => Err(OptionError(format!("{key} has no value; write {key}:VALUE"))),
        }
    }

    fn word(&mut self, key: &str) -> Result<String, OptionError> {
        match self.next() {
            Some(token) if !matches!(token.as_str(), "," | ":" | "[" | "]") => Ok(token),
            _ => Err(OptionError(format!("{key} has no value; write {key}:VALUE"))),
        }
    }

    fn skip_list(&mut self, key: &str) -> Result<(), OptionError> {
        self.expect("[", key)?;
        while let Some(token) = self.next() {
            if token == "]" {
                return Ok(());
            }
        }
        Err(OptionError(format!("the list of {key} is not closed")))
    }

    fn number(&mut self, key: &str) -> Result<u64, OptionError> {
        let word = self.word(key)?;
        // PyTorch reads the leading digits and ignores what follows: 64MB is 64.
        let digits = word.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(word.len());
        word[..digits].parse().map_err(|_| OptionError(format!("{key}:{word} is not a whole number")))
    }

    fn boolean(&mut self, key: &str) -> Result<bool, OptionError> {
        match self.word(key)?.as_str() {
            "True" => Ok(true),
            "False" => Ok(false),
            other => Err(OptionError(format!("{key}:{other}: PyTorch reads only True and False here"))),
        }
    }

    fn fraction(&mut self, key: &str, open: bool) -> Result<f64, OptionError> {
        let word = self.word(key)?;
        let value: f64 = word.parse().map_err(|_| OptionError(format!("{key}:{word} is not a number")))?;
        if open && !(value > 0.0 && value < 1.0) {
            return Err(self.refuse(key, "must lie between 0 and 1, both excluded"));
        }
        if !open && !(0.0..=1.0).contains(&value) {
            return Err(self.refuse(key, "must lie between 0 and 1"));
        }
        Ok(value)
    }

    /// The lower end of both split options: above 20 up to 2.9, from 20 in 2.10, the segment size from 2.11.
    fn at_least_a_segment(&self, key: &str, mb: u64, large_segment: u64) -> Result<u64, OptionError> {
        let bytes = mb.saturating_mul(MIB);
        let (accepted, rule) = if self.profile.version < (2, 10) {
            (mb > 20, "must be more than 20".to_string())
        } else if self.profile.version < (2, 11) {
            (mb >= 20, "must be at least 20".to_string())
        } else {
            (bytes >= large_segment, format!("must be at least {}", large_segment / MIB))
        };
        if accepted { Ok(bytes) } else { Err(self.refuse(key, &rule)) }
    }

    fn roundup(&mut self, key: &str) -> Result<[u64; 16], OptionError> {
        let mut table = [0; 16];
        if self.peek() != Some("[") {
            let divisions = self.number(key)?;
            if !divisions.is_power_of_two() {
                return Err(self.refuse(key, "must be a power of two"));
            }
            table.fill(divisions);
            return Ok(table);
        }
        self.next();
        let mut last = None;
        loop {
            let size = self.word(key)?;
            self.expect(":", key)?;
            let divisions = self.number(key)?;
            let off_is_allowed = self.profile.version >= (2, 4);
            let is_off = divisions == 0 && off_is_allowed;
            if !is_off && !divisions.is_power_of_two() {
                return Err(self.refuse(key, "must list powers of two"));
            }
            if size == ">" {
                let from = match last {
                    None if self.profile.rest_overwrites_last_roundup() => 0,
                    None => 1,
                    Some(last) if self.profile.rest_overwrites_last_roundup() => last,
                    Some(last) => last + 1,
                };
                table[from.min(16)..].fill(divisions);
            } else {
                let mb: u64 = size
                    .parse()
                    .map_err(|_| OptionError(format!("{key}: `{size}` is neither a number of MB nor `>`")))?;
                if !mb.is_power_of_two() {
                    return Err(self.refuse(key, "must list sizes that are powers of two"));
                }
                let index = (mb.ilog2() as usize).min(15);
                if last.is_none() {
                    table[..index].fill(divisions);
                }
                table[index] = divisions;
                last = Some(index);
            }
            match self.next().as_deref() {
                Some("]") => return Ok(table),
                Some(",") if self.peek() == Some("]") => {
                    self.next();
                    return Ok(table);
                }
                Some(",") => {}
                _ => return Err(OptionError(format!("{key}: the list is not closed with `]`"))),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::profile::profile;
    use super::*;

    fn with(text: &str, minor: u8) -> Result<Options, String> {
        parse(text, profile((2, minor)).unwrap()).map_err(|error| error.0)
    }

    #[test]
    fn options_are_read_as_the_release_reads_them() {
        assert_eq!(with("", 11), Ok(Options::default()));
        assert_eq!(with("max_split_size_mb:64MB", 11).unwrap().max_split, 64 * MIB);
        assert_eq!(with(" max_split_size_mb : 64 , ", 11).unwrap().max_split, 64 * MIB);
        assert!(with("expandable_segments:True", 1).unwrap().expandable_segments);
        let list = "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]";
        let old = with(list, 9).unwrap().roundup_divisions;
        assert_eq!(old, [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 8, 8, 8, 8, 8, 8]);
        let new = with(list, 10).unwrap().roundup_divisions;
        assert_eq!(new, [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8]);
        assert_eq!(with("roundup_power2_divisions:[>:4]", 9).unwrap().roundup_divisions, [4; 16]);
        assert_eq!(with("roundup_power2_divisions:[>:4]", 10).unwrap().roundup_divisions[0], 0);
    }

    #[test]
    fn options_are_refused_as_the_release_refuses_them() {
        for (text, minor, said) in [
            ("expandable_segments:True", 0, "does not know expandable_segments"),
            ("expandable_segments:true", 11, "reads only True and False"),
            ("max_split_size_mb:20", 9, "must be more than 20"),
            ("max_split_size_mb:19", 10, "must be at least 20"),
            ("large_segment_size_mb:64,max_split_size_mb:32", 11, "must be at least 64"),
            ("large_segment_size_mb:10", 11, "must be more than 10"),
            ("garbage_collection_threshold:1.0", 11, "both excluded"),
            ("garbage_collection_threshold:0", 11, "both excluded"),
            ("roundup_power2_divisions:3", 11, "power of two"),
            ("roundup_power2_divisions:[256:0]", 3, "powers of two"),
            ("roundup_power2_divisions:[256:4", 11, "not closed"),
            ("max_split_size", 11, "no allocator option `max_split_size`"),
            ("max_split_size_mb", 11, "has no value"),
            ("max_split_size_mb:", 11, "has no value"),
            ("max_split_size_mb:MB", 11, "not a whole number"),
            ("expandable_segments_reserve:0.5", 14, "does not know expandable_segments_reserve"),
            ("expandable_segments_reserve_by_class:a:0.5", 15, "expected `[`"),
            ("backend:cudaMallocAsync", 11, "--policy cuda_async"),
        ] {
            let error = with(text, minor).unwrap_err();
            assert!(error.contains(said), "{text} on 2.{minor}: {error}");
        }
        assert!(with("max_split_size_mb:20", 10).is_ok());
        assert!(with("roundup_power2_divisions:[256:0]", 4).is_ok());
    }
}

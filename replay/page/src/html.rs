//! The file: a page that loads nothing, with its data inside.
//!
//! The policy in its head lets no code run but ours, named by its hash, and nothing be fetched. No name of a trace is ever
//! markup: all of them are in the data, which is base64, and the code sets them as text.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

/// Made from `page/` by `make page`.
const SCRIPT: &str = include_str!("bundle.js");
const STYLE: &str = include_str!("bundle.css");
/// `sha256-...` of the script and of the style.
const HASHES: &str = include_str!("bundle.sha256");

/// Where a page is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reader {
    /// From a file, alone.
    File,
    /// From `gputrace serve`, which it may ask for more, and nobody else.
    Served,
}

/// The page with this data.
pub(super) fn page(data: &[u8], reader: Reader) -> String {
    let (may_ask, asks) = match reader {
        Reader::File => ("", ""),
        Reader::Served => (" connect-src 'self';", "\n<meta name=\"gputrace-details\" content=\"details\">"),
    };
    let mut hashes = HASHES.lines();
    let (script, style) = (hashes.next().unwrap_or_default(), hashes.next().unwrap_or_default());
    let data = base64(&compressed(data));
    format!(
        r#"<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:;{may_ask} base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width">
<meta name="referrer" content="no-referrer">{asks}
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>gputrace</title>
<style>{STYLE}</style>
</head>
<body>
<noscript>This page is drawn by its own JavaScript, which is switched off. The same in a terminal: gputrace report</noscript>
<div id="app"></div>
<script type="application/gzip+base64" id="data">{data}</script>
<script>{SCRIPT}</script>
</body>
</html>
"#
    )
}

fn compressed(data: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(vec![], Compression::default());
    // Writing to memory does not fail.
    let _ = encoder.write_all(data);
    encoder.finish().unwrap_or_default()
}

/// RFC 4648, section 4.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let byte = |idx: usize| u32::from(three.get(idx).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for letter in 0..4 {
            let six = (bits >> (18 - 6 * letter)) & 63;
            text.push(if letter <= three.len() { char::from(LETTERS[six as usize]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_rfc_4648() {
        let all = ["", "f", "fo", "foo", "foob", "fooba", "foobar"].map(|text| base64(text.as_bytes()));
        assert_eq!(all, ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy"]);
    }

    #[test]
    fn the_code_ends_where_it_ends() {
        for (what, text) in [("script", SCRIPT), ("style", STYLE)] {
            let text = text.to_lowercase();
            assert!(!text.contains(&format!("</{what}")) && !text.contains("<!--"), "{what}");
        }
    }
}

//! With the feature `cudarc`, writes the list of rows that tests/prototypes.rs holds against that crate.

use std::fmt::Write;

#[path = "src/rows.rs"]
#[allow(dead_code, missing_docs, unreachable_pub)]
mod rows;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_CUDARC").is_none() {
        return;
    }
    println!("cargo:rerun-if-changed=../{}", rows::TABLE);
    let mut list =
        String::from("fn declared() -> Vec<(&'static str, Vec<(&'static str, usize)>)> {\nvec![\n");
    // It declares what cuda.h of one release does: neither older prototypes nor the per-thread ones.
    // cudarc 0.19 leaves out the checkpoints; NVIDIA's cuda.h has them, and tests/prototypes.rs reads it.
    let current = |row: &&rows::Row| {
        row.prototype().is_some()
            && !row.doc.contains("` of CUDA ")
            && !row.name.starts_with("cuCheckpointProcess")
    };
    for row in rows::all().iter().filter(current) {
        let (name, holes) = (&row.name, vec!["_"; row.parameters.len()].join(", "));
        let _ = writeln!(list, "(\"{name}\", Parameters::list(sys::{name} as unsafe fn({holes}) -> _)),");
    }
    list += "]\n}\n";
    let out = std::path::PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    if let Err(error) = std::fs::write(out.join("cudarc_rows.rs"), list) {
        println!("cargo:warning=cudarc_rows.rs: {error}");
    }
}

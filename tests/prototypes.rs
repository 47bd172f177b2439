//! The prototypes of the hook table: each row's Rust types against the C prototype in its doc comment, those against
//! NVIDIA's cuda.h of three releases, and, with the feature `cudarc`, the rows against the declarations of that crate.

use gputrace_skip::skip;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use gputrace_tests::rows::{self, Row, TABLE};
use gputrace_tests::wheels::{self, Major};

/// Offsets and sizes that shim/src/hooks/structs.rs reads by.
const LAYOUTS: &[(&str, &str, usize)] = &[
    ("CUmemAllocationProp", "location", 8),
    ("CUmemPoolProps", "location", 8),
    ("CUmemAccessDesc", "flags", 8),
    ("CUmemLocation", "id", 4),
    ("CUDA_MEM_ALLOC_NODE_PARAMS", "bytesize", 104),
    ("CUDA_MEM_ALLOC_NODE_PARAMS", "dptr", 112),
    ("CUDA_EXTERNAL_MEMORY_BUFFER_DESC", "size", 8),
    ("CUDA_ARRAY_DESCRIPTOR", "Format", 16),
    ("CUDA_ARRAY_DESCRIPTOR", "NumChannels", 20),
    ("CUDA_ARRAY3D_DESCRIPTOR", "Depth", 16),
    ("CUDA_ARRAY3D_DESCRIPTOR", "Format", 24),
    ("CUDA_ARRAY3D_DESCRIPTOR", "NumChannels", 28),
];
/// Structures that 11.8 does not have.
const LATER_LAYOUTS: &[(&str, &str, usize)] = &[
    ("CUmulticastObjectProp", "size", 8),
    ("CUgraphNodeParams", "type", 0),
    ("CUgraphNodeParams", "alloc", 16),
    ("CUgraphNodeParams", "free", 16),
    ("CUDA_MEM_FREE_NODE_PARAMS", "dptr", 0),
    ("CUDA_MEM_ALLOC_NODE_PARAMS_v2", "bytesize", 104),
    ("CUDA_MEM_ALLOC_NODE_PARAMS_v2", "dptr", 112),
];

/// The parameters of a C prototype: type and name.
fn c_parameters(prototype: &str) -> Vec<(String, String)> {
    let list =
        prototype.split_once('(').and_then(|(_, rest)| rest.split_once(')')).map_or("", |(list, _)| list);
    let parameter = |text: &str| {
        let text = text.trim();
        let name = text.rfind(|c: char| !c.is_alphanumeric() && c != '_').map_or(0, |at| at + 1);
        (text[..name].trim().to_owned(), text[name..].to_owned())
    };
    list.split(',').filter(|part| !part.trim().is_empty()).map(parameter).collect()
}

/// Bytes of a Rust type of the table, and whether it is a pointer or handle.
fn shape(kind: &str) -> (usize, bool) {
    match kind {
        "u64" | "usize" => (8, false),
        "i32" | "u32" => (4, false),
        "IpcMemHandle" => (64, false),
        "Out" | "Handle" => (8, true),
        _ if kind.starts_with('*') => (8, true),
        _ => panic!("{TABLE}: what is a `{kind}`?"),
    }
}

/// The row's own prototype, or that of the row it is said to be as.
fn prototype<'a>(row: &'a Row, rows: &'a [Row]) -> &'a str {
    let Row { line, name, doc, parameters, .. } = row;
    if let Some(other) = doc.strip_prefix("As `").and_then(|rest| rest.split('`').next()) {
        let other = rows.iter().find(|row| row.name == other);
        let other =
            other.unwrap_or_else(|| panic!("{TABLE}:{line}: {name} is said to be as a row that is none"));
        let types = |row: &Row| row.parameters.iter().map(|(_, kind)| kind.clone()).collect::<Vec<_>>();
        assert_eq!(types(row), types(other), "{TABLE}:{line}: {name} is not as {}", other.name);
        return prototype(other, rows);
    }
    let prototype = row.prototype().and_then(|text| text.strip_prefix("CUresult ")).unwrap_or_else(|| {
        panic!("{TABLE}:{line}: {name} needs its C prototype as doc comment: /// `CUresult {name}(...)`")
    });
    let (c_name, _) = prototype.split_once('(').expect("a prototype has parentheses");
    assert_eq!(c_name, name, "{TABLE}:{line}: the prototype is another function's");
    assert_eq!(
        parameters.len(),
        c_parameters(prototype).len(),
        "{TABLE}:{line}: {name} has not as many parameters as in C"
    );
    prototype
}

#[test]
fn rows_have_pointers_where_their_c_prototypes_have_them() {
    let rows = rows::all();
    for row in &rows {
        for ((c_type, c_name), (name, kind)) in
            c_parameters(prototype(row, &rows)).iter().zip(&row.parameters)
        {
            let place =
                format!("{TABLE}:{}: {}: `{name}: {kind}` for `{c_type} {c_name}`", row.line, row.name);
            let (bytes, is_pointer) = shape(kind);
            if c_type.ends_with('*') {
                assert!(is_pointer, "{place}");
            } else if kind.starts_with('*') || kind == "Out" {
                panic!("{place}");
            }
            match c_type.as_str() {
                "CUdeviceptr" | "CUmemGenericAllocationHandle" | "unsigned long long" | "cuuint64_t" => {
                    assert_eq!(kind, "u64", "{place}");
                }
                "size_t" => assert_eq!(kind, "usize", "{place}"),
                "int" | "CUdevice" => assert_eq!(kind, "i32", "{place}"),
                "unsigned int" => assert_eq!(kind, "u32", "{place}"),
                "CUipcMemHandle" => assert_eq!(bytes, 64, "{place}"),
                _ => {}
            }
        }
    }
}

const INCLUDES: &str = "#define __CUDA_API_VERSION_INTERNAL\n#include <stddef.h>\n#include <cuda.h>\n";

/// Declares every row that the preprocessed header declares once more, and says how large each parameter is for us.
fn declarations(rows: &[Row], header: &str) -> (String, BTreeSet<String>) {
    let mut text = String::from(INCLUDES);
    let mut checked = BTreeSet::new();
    let is_declared = |name: &str| header.contains(&format!(" {name}("));
    for row in rows {
        let prototype = prototype(row, rows);
        let of = prototype.split('(').next().unwrap_or_default();
        if !is_declared(of) {
            continue;
        }
        checked.insert(row.name.clone());
        text += &format!("CUresult {prototype};\n");
        for ((c_type, _), (_, kind)) in c_parameters(prototype).iter().zip(&row.parameters) {
            text += &format!("_Static_assert(sizeof({c_type}) == {}, \"{}\");\n", shape(kind).0, row.name);
        }
    }
    for (structure, field, offset) in LAYOUTS.iter().chain(LATER_LAYOUTS) {
        if header.contains(structure) {
            text +=
                &format!("_Static_assert(offsetof({structure}, {field}) == {offset}, \"{structure}\");\n");
        }
    }
    (text, checked)
}

#[test]
fn rows_are_declared_as_in_cuda_h() {
    let rows = rows::all();
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let mut checked = BTreeSet::new();
    for major in Major::ALL {
        let folder = match wheels::headers(major) {
            Ok(folder) => folder,
            Err(reason) => return skip(&format!("cuda.h of {major:?}"), reason),
        };
        let source = scratch.join(format!("prototypes.{major:?}.c"));
        let (header, _) = compiler(&source, INCLUDES, &folder, "-E");
        let (text, names) = declarations(&rows, &header);
        compile(&source, &text, &folder);
        // A checker that cannot fail would be none.
        let wrong =
            text.replace("CUresult cuMemFree_v2(CUdeviceptr dptr)", "CUresult cuMemFree_v2(int dptr)");
        assert!(text != wrong, "cuMemFree_v2 is not declared");
        assert!(
            !compiler(&source, &wrong, &folder, "-fsyntax-only").1.is_empty(),
            "a wrong prototype was not noticed"
        );
        checked.extend(names);
    }
    let unchecked: Vec<_> =
        rows.iter().filter(|row| !checked.contains(&row.name)).map(|row| &row.name).collect();
    assert!(unchecked.is_empty(), "no cuda.h declares {unchecked:?}");
}

fn compile(source: &Path, text: &str, folder: &Path) {
    let (_, problems) = compiler(source, text, folder, "-fsyntax-only");
    assert!(problems.is_empty(), "{problems}");
}

/// What the compiler writes, and what it has to say.
fn compiler(source: &Path, text: &str, folder: &Path, option: &str) -> (String, String) {
    fs::write(source, text).expect("a scratch directory");
    let output = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .args(["-std=gnu11", "-Wall", "-Werror", "-Wno-unknown-pragmas", option, "-isystem"])
        .arg(folder)
        .arg(source)
        .output()
        .expect("a C compiler");
    let _ = fs::remove_file(source);
    [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).into()
}

/// cudarc has the prototypes of one release: rows of older ones and of per-thread streams are not in it.
#[cfg(feature = "cudarc")]
mod cudarc {
    use super::{rows, shape};
    use ::cudarc::driver::sys;

    /// Types and sizes of a function's parameters.
    trait Parameters {
        fn list(self) -> Vec<(&'static str, usize)>;
    }
    macro_rules! parameters {
        ($($name:ident)*) => {
            impl<R, $($name),*> Parameters for unsafe fn($($name),*) -> R {
                fn list(self) -> Vec<(&'static str, usize)> {
                    vec![$((std::any::type_name::<$name>(), size_of::<$name>())),*]
                }
            }
        };
    }
    parameters!(A);
    parameters!(A B);
    parameters!(A B C);
    parameters!(A B C D);
    parameters!(A B C D E);
    parameters!(A B C D E F);
    parameters!(A B C D E F G);
    parameters!(A B C D E F G H);

    // `ROWS`, made by build.rs from the table.
    include!(concat!(env!("OUT_DIR"), "/cudarc_rows.rs"));

    #[test]
    fn rows_are_declared_as_in_cudarc() {
        let rows = rows::all();
        let declared = declared();
        assert!(declared.len() > 40);
        for (name, theirs) in declared {
            let row = rows.iter().find(|row| row.name == name).expect("made from the rows");
            assert_eq!(row.parameters.len(), theirs.len(), "{name}");
            for ((ours, kind), (their_type, bytes)) in row.parameters.iter().zip(theirs) {
                let (size, is_pointer) = shape(kind);
                assert_eq!(size, bytes, "{name}: {ours}: {kind} for {their_type}");
                assert_eq!(
                    is_pointer,
                    their_type.starts_with('*'),
                    "{name}: {ours}: {kind} for {their_type}"
                );
            }
        }
    }
}

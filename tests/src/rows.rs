//! The rows of the library's hook table, read from its source: a new row is covered by every test that asks here.

use std::fs;
use std::path::Path;

/// The table, below the root of the sources.
pub const TABLE: &str = "shim/src/hooks/cuda_driver.rs";

/// A row of the hook table.
#[derive(Clone, Debug)]
pub struct Row {
    /// Line of its `fn` in [`TABLE`].
    pub line: usize,
    /// The exported symbol.
    pub name: String,
    /// The first line of its doc comment.
    pub doc: String,
    /// Names and types of its parameters.
    pub parameters: Vec<(String, String)>,
    /// Whether each call becomes an event of its own: `custom` rows do so only if they are told which row they are.
    pub is_event: bool,
}

impl Row {
    /// The C prototype that its doc comment begins with; `None` if it says only how it differs from another row.
    pub fn prototype(&self) -> Option<&str> {
        self.doc
            .strip_prefix('`')?
            .split_once('`')
            .map(|(prototype, _)| prototype)
            .filter(|p| p.contains('('))
    }

    /// The types of its parameters in C, with commas between.
    pub fn c_types(&self) -> String {
        self.c_list(|_, kind| match kind {
            "u64" => "uint64_t",
            "usize" => "size_t",
            "i32" => "int",
            "u32" => "unsigned",
            "IpcMemHandle" => "struct ipc_handle",
            _ => "void *",
        })
    }

    /// Something for each parameter's name and type, with commas between.
    pub fn c_list(&self, each: impl Fn(&str, &str) -> &'static str) -> String {
        self.parameters.iter().map(|(name, kind)| each(name, kind)).collect::<Vec<_>>().join(", ")
    }

    /// What programs ask `cuGetProcAddress` for: the name without version and flavour.
    pub fn base_name(&self) -> &str {
        let name = self.name.strip_suffix("_ptsz").unwrap_or(&self.name);
        match name.rsplit_once("_v") {
            Some((base, version)) if version.chars().all(|c| c.is_ascii_digit()) => base,
            _ => name,
        }
    }
}

/// The table of NCCL's functions, below the root of the sources.
pub const NCCL_TABLE: &str = "shim/src/hooks/nccl.rs";

/// Names of the functions of NCCL that are rows, without their other names that begin with `p`.
///
/// # Panics
/// If the source is not there or has no rows.
pub fn nccl() -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(NCCL_TABLE);
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let names = text.lines().filter_map(|line| line.trim().strip_prefix("fn nccl")?.split_once(" / p"));
    let names: Vec<String> = names.map(|(name, _)| format!("nccl{name}")).collect();
    assert!(names.len() > 40, "{NCCL_TABLE}: only {} rows were understood", names.len());
    names
}

/// Every row, in order.
///
/// # Panics
/// If the source is not there or has no rows.
pub fn all() -> Vec<Row> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(TABLE);
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut rows: Vec<Row> = Vec::new();
    let mut doc: Option<String> = None;
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if let Some(text) = line.strip_prefix("/// ") {
            doc.get_or_insert_with(|| text.to_owned());
        } else if let Some((name, rest)) = line.strip_prefix("fn ").and_then(|rest| rest.split_once('(')) {
            let parameters = rest.split(") as ").next().unwrap_or_default();
            let parameter = |text: &str| {
                let (name, kind) = text.split_once(':')?;
                Some((name.trim().to_owned(), kind.trim().to_owned()))
            };
            rows.push(Row {
                line: number + 1,
                name: name.to_owned(),
                doc: doc.take().unwrap_or_default(),
                parameters: parameters.split(',').filter_map(parameter).collect(),
                is_event: false,
            });
        }
        if let Some(row) = rows.last_mut() {
            row.is_event |= ["= acquire ", "= observe ", "= release ", "{ row: Row::"]
                .iter()
                .any(|shape| line.contains(shape));
        }
        if line.is_empty() {
            doc = None;
        }
    }
    assert!(rows.len() > 60, "{TABLE}: only {} rows were understood", rows.len());
    rows
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_lose_version_and_flavour() {
        let rows = super::all();
        let base =
            |name: &str| rows.iter().find(|row| row.name == name).map(|row| row.base_name().to_owned());
        assert_eq!(base("cuMemAlloc_v2").as_deref(), Some("cuMemAlloc"));
        assert_eq!(base("cuStreamBeginCapture_v2_ptsz").as_deref(), Some("cuStreamBeginCapture"));
        assert_eq!(base("cuMemCreate").as_deref(), Some("cuMemCreate"));
    }
}

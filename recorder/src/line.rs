//! A line of the source that an address stands for, and names as the source has them.

/// Longest name that is kept: C++ templates of CUDA kernels can be megabytes long.
const MOST_NAME: usize = 2048;
/// Functions of an address, inlined ones included, of which more than these are left out: compilers stop far earlier.
pub(crate) const MOST_INLINED: usize = 128;

/// A function at an address.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Line {
    pub(crate) function: String,
    pub(crate) file: String,
    pub(crate) line: u32,
}

impl Line {
    /// As debug information has them.
    pub(crate) fn of<R: addr2line::gimli::Reader>(
        function: Option<&addr2line::FunctionName<R>>,
        location: Option<&addr2line::Location<'_>>,
    ) -> Line {
        let function = function.and_then(|function| function.raw_name().ok());
        Line {
            function: function.map(|name| demangle(&name)).unwrap_or_default(),
            file: cut(location.and_then(|location| location.file).unwrap_or_default().to_owned()),
            line: location.and_then(|location| location.line).unwrap_or_default(),
        }
    }
}

/// A C++ or Rust name as its source has it; any other as it is.
pub(crate) fn demangle(name: &str) -> String {
    let name = name.split('@').next().unwrap_or(name);
    let readable = if let Ok(rust) = rustc_demangle::try_demangle(name) {
        format!("{rust:#}")
    } else if name.starts_with("_Z") && name.len() <= MOST_NAME {
        cpp_demangle::Symbol::new(name)
            .ok()
            .and_then(|symbol| symbol.demangle().ok())
            .unwrap_or_else(|| name.to_owned())
    } else {
        name.to_owned()
    };
    cut(readable)
}

/// No longer than names are kept.
fn cut(mut name: String) -> String {
    if name.len() > MOST_NAME {
        let end = (0..=MOST_NAME).rev().find(|at| name.is_char_boundary(*at)).unwrap_or(0);
        name.truncate(end);
        name.push('…');
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_readable() {
        assert_eq!(
            demangle("_ZN3c104cuda20CUDACachingAllocator3getEv"),
            "c10::cuda::CUDACachingAllocator::get()"
        );
        assert_eq!(demangle("_ZN4core3fmt5write17h0123456789abcdefE"), "core::fmt::write");
        assert_eq!(demangle("cuMemAlloc_v2"), "cuMemAlloc_v2");
        assert_eq!(demangle("malloc@@GLIBC_2.2.5"), "malloc");
    }
}

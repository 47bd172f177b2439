//! The hook table: one row a function, from which everything else comes.
//!
//! ```text
//! /// `CUresult cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)`
//! fn cuMemAlloc_v2(dptr: *mut u64, bytesize: usize) as "cudaMalloc"
//!     = acquire Alloc { bytes: bytesize } out { addr: read(dptr) };
//! ```
//!
//! says: export `cuMemAlloc_v2`; call the driver's; then record an [`Action::Alloc`] whose `bytes` is the second
//! argument and whose `addr` is what the driver wrote. `in` fields are recorded whatever the driver says: a request
//! that failed is the most wanted event of all. `out` fields are read only after success.
//! The text after `as` is the function of the CUDA runtime that ends here, empty if there is none.
//!
//! Shapes: `acquire` gives memory or state out and may begin the session, `release` takes it back and is recorded
//! before it runs, `observe` is recorded only where a session is, and `custom` rows call a function of their own.

use core::ffi::CStr;

/// What the loader hooks, `doctor` and the trace know of a row.
pub(crate) struct Hook {
    /// The exported symbol.
    pub(crate) name: &'static CStr,
    /// The function of the CUDA runtime that ends here; empty if there is none.
    pub(crate) runtime: &'static str,
    /// Our function, the exported one.
    pub(crate) ours: *const (),
    /// Its twin that calls the driver even where another preloaded library stands between us and the driver.
    pub(crate) to_driver: *const (),
}

// SAFETY: addresses of functions are plain numbers.
unsafe impl Sync for Hook {}

/// Writes the exported functions, the slots of the real ones, and the table.
macro_rules! hooks {
    ($(
        $(#[$doc:meta])*
        fn $name:ident($($arg:ident: $type:ty),* $(,)?) as $runtime:literal
            = $shape:ident $($action:ident)? $({ $($field:ident: $value:expr),* $(,)? })?
              $(out { $($out_field:ident: $out_value:expr),* $(,)? })?
              $(via $custom:path)?;
    )*) => {
        /// Places of the rows in [`HOOKS`].
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        #[derive(Clone, Copy, PartialEq, Eq)]
        #[repr(u16)]
        pub(crate) enum Row { $( $name, )* }

        /// How many rows there are.
        pub(crate) const ROWS: usize = [ $( stringify!($name), )* ].len();

        /// Every function we stand in for.
        pub(crate) static HOOKS: &[$crate::hook::Hook] = &[ $( $crate::hook::Hook {
            // SAFETY: the literal ends with its only zero.
            name: unsafe { ::core::ffi::CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes()) },
            runtime: $runtime,
            ours: $name as *const (),
            to_driver: to_driver::$name as *const (),
        }, )* ];

        $(
            $(#[$doc])*
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]
            pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> i32 {
                type Real = unsafe extern "C" fn($($type),*) -> i32;
                // SAFETY: the row gives the function's own prototype.
                let real = match unsafe { loader::real::<Real>(Row::$name as u16) } {
                    Some(real) => real,
                    None => return loader::without_driver(Row::$name as u16),
                };
                // SAFETY: the program's own arguments, passed on unchanged.
                let run = || unsafe { real($($arg),*) };
                hooks!(@$shape $name, run $(, $action)? $(, { $($field: $value),* })? $(, out { $($out_field: $out_value),* })? $(, via $custom)?)
            }
        )*

        /// The same functions once more, for who asks for the driver's own.
        mod to_driver {
            use super::*;
            $(
                #[allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]
                pub(super) unsafe extern "C" fn $name($($arg: $type),*) -> i32 {
                    type Real = unsafe extern "C" fn($($type),*) -> i32;
                    // SAFETY: the row gives the function's own prototype.
                    let real = match unsafe { loader::driver_real::<Real>(Row::$name as u16) } {
                        Some(real) => real,
                        None => return loader::without_driver(Row::$name as u16),
                    };
                    // SAFETY: the program's own arguments, passed on unchanged.
                    let run = || unsafe { real($($arg),*) };
                    hooks!(@$shape $name, run $(, $action)? $(, { $($field: $value),* })? $(, out { $($out_field: $out_value),* })? $(, via $custom)?)
                }
            )*
        }
    };
    (@acquire $name:ident, $run:ident, $action:ident, { $($field:ident: $value:expr),* } $(, out { $($out_field:ident: $out_value:expr),* })?) => {
        $crate::probe::acquire($crate::session::Start::IfNeeded, Row::$name as u16, Action::$action, $run,
            hooks!(@fill { $($field: $value),* } $(, out { $($out_field: $out_value),* })?))
    };
    (@observe $name:ident, $run:ident, $action:ident, { $($field:ident: $value:expr),* } $(, out { $($out_field:ident: $out_value:expr),* })?) => {
        $crate::probe::acquire($crate::session::Start::OnlyIfLive, Row::$name as u16, Action::$action, $run,
            hooks!(@fill { $($field: $value),* } $(, out { $($out_field: $out_value),* })?))
    };
    (@release $name:ident, $run:ident, $action:ident, { $($field:ident: $value:expr),* }) => {
        $crate::probe::release(Row::$name as u16, Action::$action, $run, hooks!(@fill { $($field: $value),* }))
    };
    (@custom $name:ident, $run:ident, { $($field:ident: $value:expr),* }, via $custom:path) => {
        $custom($run, $($value),*)
    };
    (@fill { $($field:ident: $value:expr),* } $(, out { $($out_field:ident: $out_value:expr),* })?) => {
        // SAFETY: `in` values read arguments, or structures the function reads itself and that were checked for null;
        // `out` values read what the function wrote, after it said that it succeeded.
        #[allow(unused_unsafe, unused_variables)]
        |draft: &mut $crate::probe::Draft, succeeded: bool| unsafe {
            $( draft.$field($value); )*
            $( if succeeded { $( draft.$out_field($out_value); )* } )?
        }
    };
}
pub(crate) use hooks;

//! Link settings of `libgputrace.so`.

fn main() {
    for argument in [
        // Pointers to our hooks are handed to CUDA: they must stay valid for ever.
        "-Wl,-z,nodelete",
        // No lazy binding: a first call must not enter the loader from inside a hook.
        "-Wl,-z,now",
        "-Wl,-z,relro",
        "-Wl,-soname,libgputrace.so",
        // Our own tables mean our own functions, also where another preloaded library before us has some of that name.
        "-Wl,-Bsymbolic",
        // libgcc_s and libm are not needed; a preload drags everything it needs into every process.
        "-Wl,--as-needed",
        // Built alone, nobody else asks for the C library: without it its symbols would have no versions.
        "-lc",
    ] {
        println!("cargo:rustc-link-arg-cdylib={argument}");
    }
    println!("cargo:rerun-if-changed=build.rs");
}

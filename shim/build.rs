//! Link settings of `libgputrace.so`.

fn main() {
    for argument in [
        // Pointers to our hooks are handed to CUDA: they must stay valid for ever.
        "-Wl,-z,nodelete",
        // No lazy binding: a first call must not enter the loader from inside a hook.
        "-Wl,-z,now",
        "-Wl,-z,relro",
        // No `-z shstk` (or `-z ibt`): the file does not say that it bears shadow stacks (x86-64, CET), so that glibc leaves
        // them off in a process that it is preloaded into, as NVIDIA's libraries do in one that loads them. It would be true
        // of our own code: each `ret` goes back to its `call`, also in what is written in assembly, which else only jumps on
        // to where the program wanted to go (`dlsym`, `begin`, `capture`), and a child that shares our memory never returns
        // to where we were (`gputrace_clone`). So a process where shadow stacks are forced on
        // (`GLIBC_TUNABLES=glibc.cpu.x86_shstk=on`) works. But nothing here has been run on a processor that checks it, and
        // a wrong promise ends programs, where none costs them a protection. Rust marks no targets of indirect calls (IBT;
        // `-Z cf-protection` is nightly's), which Linux does not ask of programs.
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

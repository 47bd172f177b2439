//! Prints a trace's communicators and its calls into NCCL, one line each, and the driver calls that NCCL made.
//!
//!     cargo run -p gputrace-schemas --example nccl TRACE

#![allow(clippy::print_stdout)] // It is what the program is for.

use gputrace_schemas::event::EventKind;
use gputrace_schemas::reader::Trace;

fn main() {
    let path = std::env::args().nth(1).expect("usage: nccl TRACE");
    let trace = Trace::open(&path).expect("a trace");
    for (id, communicator) in trace.communicators().iter().enumerate().skip(1) {
        println!("{id} {communicator:?}");
    }
    for event in trace.events() {
        let (thread, stack) = (event.thread.0, event.stack.0);
        match event.kind {
            EventKind::NcclEnter(enter) => {
                let name = trace.api(enter.api).map_or("?", |api| api.name.as_str());
                println!("{} thread {thread} stack {stack} {name} {enter:?}", event.time.0);
            }
            EventKind::NcclExit(exit) => println!("{} thread {thread} {exit:?}", event.time.0),
            EventKind::Call(call) if call.nccl_call != 0 => {
                let name = trace.api(call.api).map_or("?", |api| api.name.as_str());
                let whose = if call.nccl_thread { "NCCL's thread" } else { "caller" };
                println!(
                    "{} thread {thread} {name} {} bytes for communicator {}, call {}, {whose}",
                    event.time.0, call.bytes.0, call.comm.0, call.nccl_call
                );
            }
            _ => {}
        }
    }
}

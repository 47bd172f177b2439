//! How fast a ring becomes a trace: threads write blocks as PyTorch's allocator would, as fast as the ring takes them.
//!
//!     cargo run --release -p gputrace-recorder --example flood -- [EVENTS_A_THREAD [THREADS]]
#![allow(clippy::print_stdout)]

use gputrace_recorder::{Options, record};
use gputrace_ring::clock::Clock;
use gputrace_ring::map::{Map, OFF, RECORDING, Writer};
use gputrace_ring::record::{BlockAlloc, pack_device};
use gputrace_ring::ring::{Producer, Pushed};
use memmap2::MmapRaw;
use std::fs::OpenOptions;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Chunks of the default ring of 32 MiB.
const CHUNKS: u32 = 2040;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<u64>());
    let n_events = arguments.next().unwrap_or(Ok(2_500_000))?;
    let n_threads = arguments.next().unwrap_or(Ok(2))?;
    let folder = std::env::temp_dir().join(format!("gputrace-flood-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let ring = std::path::PathBuf::from(format!("/dev/shm/gputrace-flood.{}", std::process::id()));
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&ring)?;
    file.set_len(Map::bytes_for(CHUNKS) as u64)?;
    let memory = MmapRaw::map_raw(&file)?;
    let writer = Writer { pid: std::process::id(), ..Writer::default() };
    // SAFETY: new, zeroed, long enough, and mapped until the end of `main`.
    let map = unsafe { Map::create(memory.as_mut_ptr(), CHUNKS, writer, Clock::of_this_machine()) };
    let output = Some(folder.join("flood.gtr").display().to_string());
    let options = Options { output, is_its_child: true, ..Options::default() };
    let begin = Instant::now();
    let recorder = std::thread::spawn(move || {
        let summary = record(&ring, options);
        (summary, on_processor())
    });
    while map.header().recorder.value.load(Ordering::Acquire) != RECORDING {
        std::thread::sleep(Duration::from_millis(1));
    }
    let refused: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n_threads).map(|_| scope.spawn(move || flood(map, n_events))).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).sum()
    });
    let written = begin.elapsed();
    map.header().process.value.store(OFF, Ordering::Release);
    let (summary, drained) = recorder.join().map_err(|_| "the recorder panicked")?;
    let summary = summary?;
    println!(
        "{} events in {:.2} s ({:.2} s until written), {refused} pushes found the ring full; draining took {:.0} ns of \
         processor time an event; {:.2} bytes an event",
        n_events * n_threads,
        begin.elapsed().as_secs_f64(),
        written.as_secs_f64(),
        drained? as f64 / (n_events * n_threads) as f64,
        summary.bytes as f64 / summary.n_events as f64,
    );
    if let Some(error) = summary.error {
        println!("{} events were not written: {error}", summary.n_dropped);
    }
    let trace = gputrace_schemas::reader::Trace::open(&summary.trace)?;
    println!("complete: {}, {} events, {:?}", trace.is_complete(), trace.events().count(), trace.damages());
    std::fs::remove_dir_all(folder)?;
    Ok(())
}

/// Nanoseconds that this thread has had a processor.
fn on_processor() -> Result<u64, String> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").map_err(|error| error.to_string())?;
    text.split(' ').next().unwrap_or_default().parse().map_err(|_| "schedstat".to_owned())
}

/// How often the ring was full.
fn flood(map: Map, n_events: u64) -> u64 {
    let tid = std::fs::read_link("/proc/thread-self")
        .ok()
        .and_then(|link| link.file_name()?.to_str()?.parse().ok());
    let tid = tid.unwrap_or(1);
    let mut producer = Producer::new(map, tid, tid);
    let (mut refused, mut n, mut allocated) = (0, 0, 0_u64);
    while n < n_events {
        let bytes = (n % 97) * 512;
        let alloc = BlockAlloc {
            addr: 0x7f00_0000_0000 + (n * 7919 % 40_000) * 512,
            device_bytes: pack_device(0, bytes),
            requested: bytes,
            stream: 0,
            allocated: allocated + bytes,
            reserved: 1 << 33,
            stack: 0,
        };
        if producer.push_brief(producer.now(), 0, &alloc) == Pushed::Yes {
            n += 1;
            allocated += bytes;
        } else {
            refused += 1;
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    producer.complete();
    refused
}

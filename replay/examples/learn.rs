use gputrace_replay::driver::*; use gputrace_replay::ops::*;
use std::io::Read;
fn main(){ for p in std::env::args().skip(1) {
  let mut evs: Vec<(bool,u64,u64)> = vec![];
  if p.ends_with(".csv.gz") { let mut t=String::new(); flate2::read::GzDecoder::new(std::fs::File::open(&p).unwrap()).read_to_string(&mut t).unwrap();
    for l in t.lines().skip(1) { let f: Vec<&str>=l.split(',').collect(); let b: u64=f[2].parse().unwrap(); evs.push((f[0]=="malloc", u64::from_str_radix(&f[3][2..],16).unwrap(), b)); } }
  else { let s=gputrace_replay::import::read_snapshot(p.as_ref()).unwrap(); for e in &s.devices[0].driver { evs.push((e.call==DriverCall::Alloc, e.address, e.bytes)); } }
  let verbose=std::env::var("V").is_ok();
  let mut d=Driver::with_first(evs[0].1, evs[0].2); let mut n=0;
  for (i,(m,a,b)) in evs.iter().enumerate() { if *b < (2<<20) { if p.ends_with("gz") { continue } }
    if *m { n+=1; let before=d.learned; d.learn(*a,*b); if verbose && d.learned.predicted==before.predicted { println!("{i} {:#x} {} MiB {:?}", a, b>>20, d.learned); } } else { d.free(*a,*b); } }
  println!("{p} {n} {:?}", d.learned); } }

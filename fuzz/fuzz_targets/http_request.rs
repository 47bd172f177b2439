//! Any bytes as a request to `gputrace serve` and `gputrace metrics`.
#![no_main]

#[allow(dead_code)]
#[path = "../../replay/src/bin/gputrace/http/guard.rs"]
mod guard;
#[allow(dead_code)]
#[path = "../../replay/src/bin/gputrace/http/request.rs"]
mod request;

use guard::Guard;
use request::{Host, Refusal, host, parse};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let whole = parse(data);
    if let Err(refusal) = &whole {
        assert!(refusal.status().len() > 4);
    }
    // What arrives in pieces comes to the same, and nothing is refused early that would have been answered.
    let end = data.windows(4).position(|four| four == b"\r\n\r\n").map_or(data.len(), |end| end + 4);
    for piece in [1, 2, 3, 5, 8, 13, 40].into_iter().chain([end / 2, end.saturating_sub(1)]) {
        let early = data.get(..piece.min(end)).map_or(Ok(None), parse);
        match (early, &whole) {
            (Ok(None), _) => {}
            (early, whole) => assert!(early == *whole || early.is_err() && whole.is_err()),
        }
    }
    let Ok(Some(request)) = whole else { return };
    assert!(request.target.starts_with('/') && request.target.bytes().all(|byte| byte.is_ascii_graphic()));
    assert!(request.path().len() <= request.target.len());
    let named = request.header("host");
    let machine = Guard::Machine(vec!["node17".to_owned()]);
    for (guard, is_own) in [(&machine, own_name as fn(&Host) -> bool), (&Guard::Loopback(80), loopback)] {
        if guard.admit(&request).is_ok() {
            let authority = named.ok().flatten().expect("a host");
            for authority in [Some(authority), request.authority.as_deref()].into_iter().flatten() {
                assert!(host(authority).is_some_and(|(host, _)| is_own(&host)));
            }
        }
    }
    assert_ne!(machine.admit(&request), Err(Refusal::Unknown));
});

fn own_name(host: &Host) -> bool {
    match host {
        Host::Address(_) => true,
        Host::Name(name) => name == "localhost" || name == "node17",
    }
}

fn loopback(host: &Host) -> bool {
    match host {
        Host::Address(address) => address.is_loopback(),
        Host::Name(name) => name == "localhost",
    }
}

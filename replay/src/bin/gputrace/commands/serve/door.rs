//! The secret in the address that `gputrace serve` prints. Any program of this machine can reach the port, whoever runs it.

use std::io::Read;

use crate::http::{Guard, Refusal, Request};

/// Lets in whoever has the address.
#[derive(Debug)]
pub(super) struct Door {
    token: String,
    port: u16,
    guard: Guard,
}

impl Door {
    /// With a new secret, from the kernel.
    pub(super) fn new(port: u16) -> std::io::Result<Door> {
        let mut secret = [0u8; 16];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut secret)?;
        let token = secret.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Door { token, port, guard: Guard::Loopback(port) })
    }

    /// The address that lets in.
    pub(super) fn address(&self) -> String {
        format!("http://127.0.0.1:{}/{}/", self.port, self.token)
    }

    /// What a request asks for, behind the secret: `details?from=0`.
    pub(super) fn asked<'a>(&self, request: &'a Request) -> Result<&'a str, Refusal> {
        self.guard.admit(request)?;
        let path = request.target.strip_prefix('/').and_then(|path| path.split_once('/'));
        let (token, rest) = path.ok_or(Refusal::Unknown)?;
        if is_same(token.as_bytes(), self.token.as_bytes()) { Ok(rest) } else { Err(Refusal::Unknown) }
    }
}

/// How long it takes says nothing of where they differ.
fn is_same(asked: &[u8], secret: &[u8]) -> bool {
    let difference = asked.iter().zip(secret).fold(0, |difference, (a, b)| difference | (a ^ b));
    std::hint::black_box(difference) == 0 && asked.len() == secret.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::parse;

    const TOKEN: &str = "0123456789abcdef0123456789abcdef";

    fn asked(target: &str, host: &str) -> Result<String, Refusal> {
        let door = Door { token: TOKEN.to_owned(), port: 4000, guard: Guard::Loopback(4000) };
        let head = format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n");
        let request = parse(head.as_bytes()).expect(target).expect(target);
        door.asked(&request).map(str::to_owned)
    }

    #[test]
    fn who_has_the_secret_and_comes_from_here_is_let_in() {
        for host in ["127.0.0.1:4000", "localhost:4000"] {
            assert_eq!(asked(&format!("/{TOKEN}/details?from=1"), host).as_deref(), Ok("details?from=1"));
            assert_eq!(asked(&format!("/{TOKEN}/"), host).as_deref(), Ok(""));
        }
        assert_eq!(asked(&format!("http://localhost:4000/{TOKEN}/"), "localhost:4000").as_deref(), Ok(""));
    }

    #[test]
    fn nobody_else_is() {
        let short = &TOKEN[1..];
        for target in [
            "/".to_owned(),
            format!("/{TOKEN}"),
            format!("/{short}/"),
            format!("/{TOKEN}0/"),
            "//".to_owned(),
            format!("/../{TOKEN}/"),
        ] {
            assert_eq!(asked(&target, "127.0.0.1:4000"), Err(Refusal::Unknown), "{target}");
        }
        assert_eq!(asked(&format!("/{TOKEN}/"), "evil.example:4000"), Err(Refusal::Host));
    }

    #[test]
    fn every_door_has_a_secret_of_its_own() {
        let [one, other] = [Door::new(1), Door::new(1)].map(|door| door.unwrap().token);
        assert!(one != other && one.len() == 32, "{one} {other}");
    }
}

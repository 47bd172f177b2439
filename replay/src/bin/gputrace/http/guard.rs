//! Which requests may be answered: those that name this machine as their host, and that no page of another site made a browser send.
//!
//! A browser lets a page read answers of the page's own origin alone. A site gets around that by having its name lead to this machine
//! (DNS rebinding): its request then names the site as the host. A request that is sent blindly, to read nothing, has headers that say
//! where it comes from (`Origin`, `Sec-Fetch-Site`: fetch.spec.whatwg.org, w3c.github.io/webappsec-fetch-metadata).

use super::request::{Host, Refusal, Request, host};

/// Whom a server answers.
#[derive(Clone, Debug)]
pub(crate) enum Guard {
    /// Those who address the loopback interface at this port, by an address or as `localhost`.
    Loopback(u16),
    /// Those who address this machine by any address, as `localhost`, or by one of these names, in lower case. The port is not looked
    /// at: it is another one behind a forwarding.
    Machine(Vec<String>),
}

impl Guard {
    /// # Errors
    /// Why the request is not answered.
    pub(crate) fn admit(&self, request: &Request) -> Result<(), Refusal> {
        let named = request.header("host")?.ok_or(Refusal::Malformed)?;
        for authority in request.authority.as_deref().into_iter().chain([named]) {
            if !host(authority).is_some_and(|(host, port)| self.goes_by(&host, port)) {
                return Err(Refusal::Host);
            }
        }
        if is_sent_by_another_site(request, named)? { Err(Refusal::Browser) } else { Ok(()) }
    }

    fn goes_by(&self, host: &Host, port: Option<u16>) -> bool {
        match (self, host) {
            (Guard::Loopback(own), Host::Address(address)) => {
                address.is_loopback() && port.unwrap_or(80) == *own
            }
            (Guard::Loopback(own), Host::Name(name)) => name == "localhost" && port.unwrap_or(80) == *own,
            (Guard::Machine(_), Host::Address(_)) => true,
            (Guard::Machine(names), Host::Name(name)) => name == "localhost" || names.contains(name),
        }
    }
}

/// Whether a browser sent it for a page of another site, which is not how a user opens an address: that has no origin, and takes the
/// place of the page.
fn is_sent_by_another_site(request: &Request, named: &str) -> Result<bool, Refusal> {
    let origin = request.header("origin")?;
    if origin.is_some_and(|origin| origin.strip_prefix("http://") != Some(named)) {
        return Ok(true);
    }
    let is_a_tab = request.header("sec-fetch-mode")? == Some("navigate")
        && request.header("sec-fetch-dest")? == Some("document");
    Ok(match request.header("sec-fetch-site")? {
        None | Some("none" | "same-origin") => false,
        Some(_) => !is_a_tab,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::request::parse;

    fn asked(guard: &Guard, headers: &str) -> Result<(), Refusal> {
        asked_for(guard, "/", headers)
    }

    fn asked_for(guard: &Guard, target: &str, headers: &str) -> Result<(), Refusal> {
        let head = format!("GET {target} HTTP/1.1\r\n{headers}\r\n\r\n");
        guard.admit(&parse(head.as_bytes()).expect(headers).expect(headers))
    }

    #[test]
    fn on_the_loopback_interface_only_it_is_answered_for_at_its_own_port() {
        let guard = Guard::Loopback(4000);
        for host in ["127.0.0.1:4000", "localhost:4000", "LOCALHOST.:4000", "[::1]:4000", "127.8.8.8:4000"] {
            assert_eq!(asked(&guard, &format!("Host: {host}")), Ok(()), "{host}");
        }
        for host in [
            "evil.example:4000",
            "localhost.evil.example:4000",
            "127.0.0.1.evil.example:4000",
            "127.0.0.1:4001",
            "127.0.0.1",
            "10.0.0.1:4000",
            "localhost@evil.example:4000",
            "",
        ] {
            assert_eq!(asked(&guard, &format!("Host: {host}")), Err(Refusal::Host), "{host}");
        }
        assert_eq!(asked(&guard, "Accept: */*"), Err(Refusal::Malformed));
        assert_eq!(asked(&guard, "Host: localhost:4000\r\nHost: localhost:4000"), Err(Refusal::Malformed));
    }

    #[test]
    fn a_machine_goes_by_its_addresses_and_by_its_names() {
        let guard = Guard::Machine(vec!["node17".to_owned(), "node17.cluster.example".to_owned()]);
        for host in ["10.0.0.1:9464", "[fe80::1]", "localhost", "node17:80", "NODE17.cluster.example.:9464"] {
            assert_eq!(asked(&guard, &format!("Host: {host}")), Ok(()), "{host}");
        }
        for host in ["evil.example", "node17.evil.example:9464", "node1", "x.node17", "0x7f.1"] {
            assert_eq!(asked(&guard, &format!("Host: {host}")), Err(Refusal::Host), "{host}");
        }
    }

    #[test]
    fn a_whole_url_has_to_name_the_machine_as_well() {
        let guard = Guard::Machine(vec![]);
        let here = "Host: localhost";
        assert_eq!(asked_for(&guard, "http://127.0.0.1/metrics", here), Ok(()));
        assert_eq!(asked_for(&guard, "http://evil.example/metrics", here), Err(Refusal::Host));
        assert_eq!(asked_for(&guard, "http://localhost/metrics", "Host: evil.example"), Err(Refusal::Host));
    }

    #[test]
    fn a_page_of_another_site_makes_a_browser_send_nothing_that_is_answered() {
        let guard = Guard::Loopback(4000);
        let asked = |headers: &str| asked(&guard, &format!("Host: localhost:4000\r\n{headers}"));
        for own in [
            "Origin: http://localhost:4000",
            "Sec-Fetch-Site: none\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: document",
            "Sec-Fetch-Site: same-origin\r\nSec-Fetch-Mode: cors\r\nSec-Fetch-Dest: empty",
            // A link that somebody clicks on, as those of Prometheus's list of targets.
            "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: document",
        ] {
            assert_eq!(asked(own), Ok(()), "{own}");
        }
        for foreign in [
            "Origin: http://evil.example",
            "Origin: https://localhost:4000",
            "Origin: http://localhost:4001",
            "Origin: null",
            "Sec-Fetch-Site: cross-site",
            "Sec-Fetch-Site: same-site\r\nSec-Fetch-Mode: no-cors\r\nSec-Fetch-Dest: script",
            "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: iframe",
        ] {
            assert_eq!(asked(foreign), Err(Refusal::Browser), "{foreign}");
        }
    }
}

//! Answers scrapes: one at a time, and none for longer than a few seconds.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{http, openmetrics};

pub(super) struct Server {
    listener: TcpListener,
    address: SocketAddr,
}

impl Server {
    pub(super) fn bind(addresses: &[SocketAddr]) -> io::Result<Server> {
        let listener = TcpListener::bind(addresses)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok(Server { listener, address })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits so long at most, and answers whoever has come.
    pub(super) fn answer(&self, patience: Duration, mut metrics: impl FnMut() -> String) -> io::Result<()> {
        let patience = Timespec::try_from(patience).map_err(io::Error::other)?;
        match poll(&mut [PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN)], Some(&patience)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(()),
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        // Whoever hung up, or says nothing, is no error of ours.
        if let Ok((mut stream, _)) = self.listener.accept() {
            let _ = reply(&mut stream, &mut metrics);
        }
        Ok(())
    }
}

fn reply(stream: &mut TcpStream, metrics: &mut dyn FnMut() -> String) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    let line = http::request(stream)?;
    let mut words = line.split(' ');
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = path.split('?').next().unwrap_or_default();
    match (method, path) {
        ("GET", "/metrics") => http::respond(stream, "200 OK", openmetrics::TYPE, &metrics()),
        ("GET", "/") => http::respond(stream, "200 OK", "text/plain", "gputrace metrics: see /metrics\n"),
        ("GET", _) => http::respond(stream, "404 Not Found", "text/plain", "see /metrics\n"),
        _ => http::respond(stream, "405 Method Not Allowed", "text/plain", "GET /metrics\n"),
    }
}

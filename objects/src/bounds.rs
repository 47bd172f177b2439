//! Bounds on what servers answer: none is believed that its answers are as long as they should be, or ever end.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use futures_util::StreamExt;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService, ReqwestConnector,
};
use url::Url;

use super::SILENCE;

/// Most bytes of an answer that is kept in memory: several times a part of an object, or a page of a listing (1,000 keys of up to 1,024
/// bytes). A WebDAV server lists a folder of 100,000 files in about as many.
const MOST_ANSWER: usize = 64 << 20;
/// Places that a link may lead on to. Stores with several regions lead on once.
const MOST_REDIRECTS: usize = 4;

/// Clients that do not take in more of an answer than is of use.
#[derive(Debug)]
pub(crate) struct Bounded {
    streams: bool,
}

impl Bounded {
    /// For stores whose objects are fetched in parts.
    pub(crate) fn for_parts() -> Bounded {
        Bounded { streams: false }
    }

    /// For servers whose objects are fetched in one piece, into a file: those pass as they come.
    pub(crate) fn for_streams() -> Bounded {
        Bounded { streams: true }
    }
}

impl HttpConnector for Bounded {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Service { client, streams: self.streams }))
    }
}

#[derive(Debug)]
struct Service {
    client: HttpClient,
    streams: bool,
}

type Answered<'a> = Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'a>>;

impl HttpService for Service {
    fn call<'a, 'b>(&'a self, request: HttpRequest) -> Answered<'b>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async move {
            let is_object = self.streams && request.method().as_str() == "GET";
            let response = self.client.execute(request).await?;
            if is_object && response.status().is_success() {
                return Ok(response);
            }
            let (parts, body) = response.into_parts();
            let body = HttpResponseBody::from(within(body, MOST_ANSWER).await?);
            Ok(HttpResponse::from_parts(parts, body))
        })
    }
}

/// All of a body, whatever its head says of its length.
async fn within(body: HttpResponseBody, most: usize) -> Result<Vec<u8>, HttpError> {
    let (mut pieces, mut bytes) = (body.bytes_stream(), vec![]);
    while let Some(piece) = pieces.next().await {
        let piece = piece?;
        if bytes.len() + piece.len() > most {
            // Not tried again.
            return Err(HttpError::new(HttpErrorKind::Unknown, TooLong));
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes)
}

#[derive(Debug)]
struct TooLong;

impl fmt::Display for TooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the server's answer is longer than {MOST_ANSWER} bytes, more than any valid answer")
    }
}

impl Error for TooLong {}

/// What follows a link with a signature: not for long, and not from TLS to plain text.
pub(crate) fn link_client(link: &Url) -> reqwest::Result<reqwest::Client> {
    reqwest::Client::builder()
        .connect_timeout(Duration::from_secs(10))
        .read_timeout(SILENCE)
        .redirect(reqwest::redirect::Policy::limited(MOST_REDIRECTS))
        .https_only(link.scheme() == "https")
        .build()
}

//! What reads, lists and writes objects: `object_store`, run to its end on the caller's thread.

use std::fs::File;
use std::future::Future;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{
    ClientOptions, GetOptions, ObjectStore, ObjectStoreExt, ObjectStoreScheme, PutPayload, RetryConfig,
};
use url::Url;

use crate::{Error, encoded};

mod bounds;
mod upload;

use bounds::Bounded;
pub use upload::{PART_BYTES, State, Unusable, Upload};

/// Parts that are fetched at the same time.
const N_AT_ONCE: usize = 4;
/// How long something that may work again is tried.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a server may send nothing in the middle of an answer.
const SILENCE: Duration = Duration::from_secs(60);
/// Largest object that is fetched, in bytes: S3 has them up to 50 TB (docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html, 2026).
const LARGEST: u64 = 64 << 40;
/// Most objects of a folder, and most answers that list them: S3 lists a thousand in each.
const MOST_LISTED: usize = 1_000_000;
const MOST_PAGES: usize = 10_000;

/// Where an object lies.
pub(crate) struct Place {
    url: String,
    key: Key,
    store: Arc<dyn ObjectStore>,
    /// Where the store takes an object in parts.
    parts: Option<Arc<dyn MultipartStore>>,
    /// Where the store lists a folder in pages.
    pages: Option<Arc<dyn PaginatedListStore>>,
    /// A link with a signature in its query, which no store of the library keeps.
    link: Option<(reqwest::Client, Url)>,
    is_ranged: bool,
}

impl Place {
    pub(crate) fn of(name: &Path) -> Result<Place, Error> {
        let given = name.display().to_string();
        let wrong = |why: String| Error::Name { url: given.clone(), why };
        let url = Url::parse(&given).map_err(|error| wrong(error.to_string()))?;
        let is_web = matches!(url.scheme(), "http" | "https");
        if !is_web && (url.query().is_some() || url.fragment().is_some()) {
            return Err(wrong("write ? and # in a key as %3F and %23".to_owned()));
        }
        // The first to come decides for the process: another has done what is done here.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let key = Key::from_url_path(url.path()).map_err(|error| wrong(error.to_string()))?;
        let failed = |error: object_store::Error| store_error(&given, error);
        let retry = RetryConfig { retry_timeout: PATIENCE, max_retries: 6, ..RetryConfig::default() };
        // Whoever names a plain server in a variable or a URL means it.
        let has_plain = |names: &[&str]| {
            names.iter().any(|name| std::env::var(name).is_ok_and(|it| it.starts_with("http:")))
        };
        let options = |is_plain: bool| {
            let agent = concat!("gputrace/", env!("CARGO_PKG_VERSION"));
            let options = ClientOptions::new().with_allow_http(is_plain);
            // Large parts over slow lines: an answer that does not begin is late, one that goes on is not.
            let options = options.with_timeout(Duration::from_secs(600)).with_read_timeout(SILENCE);
            let options = options.with_connect_timeout(Duration::from_secs(10));
            reqwest::header::HeaderValue::from_str(agent)
                .map_or(options.clone(), |agent| options.with_user_agent(agent))
        };
        // In pages and parts, as all stores have it but web servers.
        fn place<S>(store: S, url: &str, key: &Key) -> Place
        where
            S: ObjectStore + MultipartStore + PaginatedListStore,
        {
            let (store, url, key) = (Arc::new(store), url.to_owned(), key.clone());
            let (parts, pages) = (Some(store.clone() as _), Some(store.clone() as _));
            Place { url, key, store, parts, pages, link: None, is_ranged: true }
        }
        if is_web {
            let store = HttpBuilder::new()
                .with_url(&url[..url::Position::BeforePath])
                .with_http_connector(Bounded::for_streams())
                .with_retry(retry)
                .with_client_options(options(url.scheme() == "http"));
            let store = store.build().map_err(failed)?;
            let link = url.query().is_some().then(|| bounds::link_client(&url)).transpose();
            let link = link.map_err(|error| wrong(error.to_string()))?.map(|client| (client, url));
            let store = Arc::new(store);
            return Ok(Place { url: given, key, store, parts: None, pages: None, link, is_ranged: false });
        }
        let scheme = ObjectStoreScheme::parse(&url).map_err(|error| wrong(error.to_string()))?.0;
        Ok(match scheme {
            ObjectStoreScheme::AmazonS3 => {
                let is_plain = has_plain(&["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"]);
                let store =
                    AmazonS3Builder::from_env().with_url(&given).with_http_connector(Bounded::for_parts());
                let store = store.with_retry(retry).with_client_options(options(is_plain));
                place(store.build().map_err(failed)?, &given, &key)
            }
            ObjectStoreScheme::GoogleCloudStorage => {
                let store = GoogleCloudStorageBuilder::from_env()
                    .with_url(&given)
                    .with_http_connector(Bounded::for_parts());
                let store = store.with_retry(retry).with_client_options(options(true));
                place(store.build().map_err(failed)?, &given, &key)
            }
            ObjectStoreScheme::MicrosoftAzure => {
                let is_plain =
                    has_plain(&["AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL"]);
                let is_plain = is_plain || std::env::var_os("AZURE_STORAGE_USE_EMULATOR").is_some();
                let store = MicrosoftAzureBuilder::from_env()
                    .with_url(&given)
                    .with_http_connector(Bounded::for_parts());
                let store = store.with_retry(retry).with_client_options(options(is_plain));
                place(store.build().map_err(failed)?, &given, &key)
            }
            _ => return Err(wrong("an unknown kind of storage".to_owned())),
        })
    }

    fn failed(&self, error: object_store::Error) -> Error {
        store_error(&self.url, error)
    }

    /// The objects of the folder of this key.
    async fn listed(&self) -> Result<Vec<Key>, Error> {
        let prefix = Some(&self.key).filter(|key| !key.as_ref().is_empty());
        let Some(pages) = &self.pages else {
            let found = self.store.list_with_delimiter(prefix).await.map_err(|error| self.failed(error))?;
            return Ok(found.objects.into_iter().map(|it| it.location).collect());
        };
        let prefix = prefix.map(|key| format!("{key}/"));
        let (mut keys, mut token) = (vec![], None);
        for _ in 0..MOST_PAGES {
            let options = PaginatedListOptions {
                delimiter: Some("/".into()),
                page_token: token.clone(),
                ..PaginatedListOptions::default()
            };
            let page = pages.list_paginated(prefix.as_deref(), options).await;
            let page = page.map_err(|error| self.failed(error))?;
            keys.extend(page.result.objects.into_iter().map(|it| it.location));
            if page.page_token.is_none() {
                return Ok(keys);
            }
            if page.page_token == token || keys.len() > MOST_LISTED {
                break;
            }
            token = page.page_token;
        }
        let why = format!(
            "the store's listing does not end ({} objects so far): name a smaller folder, or the objects themselves",
            keys.len()
        );
        Err(Error::Store { url: self.url.clone(), why })
    }

    /// Bytes that are there, or none where nothing is.
    async fn size(&self) -> Result<Option<u64>, Error> {
        match self.store.head(&self.key).await {
            Ok(found) => Ok(Some(found.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed(error)),
        }
    }

    async fn put(&self, payload: PutPayload) -> Result<(), Error> {
        if let Some((client, url)) = &self.link {
            let body: Vec<u8> = payload.iter().flat_map(|bytes| bytes.iter().copied()).collect();
            let sent = client.put(url.clone()).body(body).send().await;
            let answer = sent.and_then(reqwest::Response::error_for_status);
            return answer.map(drop).map_err(|error| link_error(&self.url, &error));
        }
        let mut folders = self.key.parts().count();
        loop {
            match self.store.put(&self.key, payload.clone()).await {
                Err(error) if self.parts.is_none() && is_there_already(&error) && folders > 0 => folders -= 1,
                done => return done.map(drop).map_err(|error| self.failed(error)),
            }
        }
    }
}

/// Of two that write into a new folder of WebDAV at once, one makes the folder, and the other is told 405 as it is there
/// (RFC 4918, 9.3.1): then the object is to be sent again, once for each folder above it at most. A server that takes no
/// objects says the same, each time.
fn is_there_already(error: &object_store::Error) -> bool {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(next) = cause {
        if next.to_string().contains("status code: 405") {
            return true;
        }
        cause = next.source();
    }
    false
}

/// What a store said, with what is to be done where that is known.
fn store_error(url: &str, error: object_store::Error) -> Error {
    // Its causes say what went wrong; what stands before them names the library.
    let mut said = vec![];
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(&error);
    while let Some(next) = cause {
        said.push(next.to_string());
        cause = next.source();
    }
    let all = error.to_string();
    let last = said.last().cloned().unwrap_or_else(|| all.clone());
    if let object_store::Error::NotFound { .. } = error {
        let why = in_tag(&last, "Message").unwrap_or_else(|| "the object does not exist".to_owned());
        return Error::NotFound { url: url.to_owned(), why };
    }
    let asks_the_machine =
        ["169.254.169.254", "metadata.google.internal", "/computeMetadata/", "/metadata/identity"];
    let is_denied = matches!(
        error,
        object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. }
    );
    let what = first_line(&last);
    let why = if asks_the_machine.iter().any(|it| all.contains(it)) {
        format!("no credentials: {}", remedy(url))
    } else if is_denied {
        format!("the store refuses the request ({what}): {}", remedy(url))
    } else {
        what
    };
    Error::Store { url: url.to_owned(), why }
}

/// A message of one line: stores answer in XML.
fn first_line(text: &str) -> String {
    let said = in_tag(text, "Message").or_else(|| in_tag(text, "Code"));
    said.unwrap_or_else(|| text.lines().next().unwrap_or_default().to_owned())
}

/// What stands between `<name>` and `</name>`.
fn in_tag(text: &str, name: &str) -> Option<String> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    Some(rest.split_once(&format!("</{name}>"))?.0.to_owned())
}

/// What gives credentials for this kind of store.
fn remedy(url: &str) -> &'static str {
    match url.split_once("://").map(|(scheme, _)| scheme) {
        Some("s3" | "s3a") => {
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (`aws configure export-credentials --format env` prints those of a profile), or AWS_SKIP_SIGNATURE=true for a public bucket"
        }
        Some("gs") => {
            "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or GOOGLE_SKIP_SIGNATURE=true for a public bucket"
        }
        Some("az") => {
            "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_KEY)"
        }
        _ => "the server requires something that a URL cannot contain",
    }
}

fn link_error(url: &str, error: &reqwest::Error) -> Error {
    match error.status() {
        Some(reqwest::StatusCode::NOT_FOUND) => {
            Error::NotFound { url: url.to_owned(), why: "the object does not exist".to_owned() }
        }
        Some(status) => Error::Store { url: url.to_owned(), why: format!("the server reports {status}") },
        None => Error::Store { url: url.to_owned(), why: error.to_string() },
    }
}

/// Runs until it is done, on this thread.
pub(crate) fn wait<T>(url: &str, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|cause| Error::Local { file: url.to_owned(), cause })?;
    runtime.block_on(work)
}

/// Fetches all of an object into a file, from its beginning.
///
/// # Errors
/// There is no such object, the store refuses or is not reached, the object changes meanwhile, or the file cannot be written.
pub fn fetch(name: &Path, to: &mut File) -> Result<(), Error> {
    let place = Place::of(name)?;
    let local = |cause| Error::Local {
        file: format!("{} (kept in {})", place.url, std::env::temp_dir().display()),
        cause,
    };
    wait(&place.url, async {
        if let Some((client, url)) = &place.link {
            let answer = client.get(url.clone()).send().await.and_then(reqwest::Response::error_for_status);
            let mut answer = answer.map_err(|error| link_error(&place.url, &error))?;
            while let Some(bytes) = answer.chunk().await.map_err(|error| link_error(&place.url, &error))? {
                to.write_all(&bytes).map_err(local)?;
            }
            return Ok(());
        }
        if place.is_ranged {
            let found = place.store.head(&place.key).await.map_err(|error| place.failed(error))?;
            if found.size > LARGEST {
                let why = format!(
                    "the store reports a size of {} bytes, more than any object can have",
                    found.size
                );
                return Err(Error::Store { url: place.url.clone(), why });
            }
            // No range is in an empty one.
            if found.size > 0 {
                return ranges(&place, to, found.size, found.e_tag).await;
            }
        }
        let found = place.store.get(&place.key).await.map_err(|error| place.failed(error))?;
        let mut bytes = found.into_stream();
        to.seek(SeekFrom::Start(0)).map_err(local)?;
        while let Some(bytes) = bytes.try_next().await.map_err(|error| place.failed(error))? {
            to.write_all(&bytes).map_err(local)?;
        }
        Ok(())
    })
}

/// The same, some parts at a time, all of the same object.
async fn ranges(place: &Place, to: &File, size: u64, e_tag: Option<String>) -> Result<(), Error> {
    let starts = (0..size).step_by(usize::try_from(PART_BYTES).unwrap_or(usize::MAX));
    let parts = stream::iter(starts.map(|start| {
        let end = size.min(start + PART_BYTES);
        let options =
            GetOptions { range: Some((start..end).into()), if_match: e_tag.clone(), ..GetOptions::default() };
        async move {
            let bytes = async { place.store.get_opts(&place.key, options).await?.bytes().await };
            let bytes = bytes.await.map_err(|error| match error {
                object_store::Error::Precondition { .. } => {
                    Error::Store { url: place.url.clone(), why: "it was replaced during the read".to_owned() }
                }
                error => place.failed(error),
            })?;
            if bytes.len() as u64 != end - start {
                let why = format!("{} bytes were requested, and the store sent {}", end - start, bytes.len());
                return Err(Error::Store { url: place.url.clone(), why });
            }
            Ok((start, bytes))
        }
    }));
    let mut parts = parts.buffer_unordered(N_AT_ONCE);
    while let Some((start, bytes)) = parts.try_next().await? {
        to.write_all_at(&bytes, start).map_err(|cause| Error::Local { file: place.url.clone(), cause })?;
    }
    Ok(())
}

/// The URLs of the objects of a folder, in the order of their names; not those of folders in it.
///
/// # Errors
/// The store refuses or is not reached.
pub fn list(folder: &Path) -> Result<Vec<String>, Error> {
    let place = Place::of(folder)?;
    let base = place.url.trim_end_matches('/').to_owned();
    wait(&place.url, async {
        let found = match place.listed().await {
            Ok(found) => found,
            Err(Error::NotFound { .. }) => vec![],
            Err(error) => return Err(error),
        };
        let names = found.iter().filter(|it| **it != place.key).filter_map(|it| it.filename());
        // URLs cannot have these: they would lead to other folders (RFC 3986, 5.2.4).
        let names = names.filter(|name| !matches!(*name, "." | ".."));
        // As a URL has it: decoded once, it is the key again.
        let mut urls: Vec<String> = names.map(|name| format!("{base}/{}", encoded(name))).collect();
        urls.sort();
        Ok(urls)
    })
}

/// Bytes of an object, or none where there is none.
///
/// # Errors
/// The store refuses or is not reached.
pub fn size(name: &Path) -> Result<Option<u64>, Error> {
    let place = Place::of(name)?;
    // A signed link is for one method alone.
    if place.link.is_some() {
        return Ok(None);
    }
    wait(&place.url, place.size())
}

/// Writes a file as an object, in one piece: anyone who reads meanwhile sees what was there before, or all of it.
///
/// # Errors
/// The store refuses or is not reached, or the file cannot be read.
pub fn put(file: &Path, name: &Path) -> Result<(), Error> {
    Upload::all_of(file, name)?.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_a_key_comes_back_from_its_url() {
        for name in ["train.gtr", "a b%20c.gtr", "what?.gtr", "a#b", "gerät.gtr", "{x}|y"] {
            let url = Url::parse(&format!("s3://bucket/{}", encoded(name))).expect("a URL");
            let key = Key::from_url_path(url.path()).expect("a key");
            assert_eq!(key.as_ref(), Key::parse(name).expect("a key").as_ref(), "{name}");
        }
    }

    #[test]
    fn what_a_url_cannot_name_is_said() {
        for (url, says) in [("s3://bucket/what?.gtr", "%3F"), ("s3://", ""), ("az:///k", "")] {
            let error = fetch(Path::new(url), &mut File::open("/dev/null").expect("a file")).expect_err(url);
            assert!(error.to_string().contains(says), "{error}");
        }
    }

    /// A server that answers each request with the next of these statuses, and says what it is asked.
    fn answers(with: &[u16]) -> (String, std::sync::mpsc::Receiver<String>) {
        use std::io::{BufRead, BufReader, Read};
        let listens = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let base = format!("http://{}", listens.local_addr().expect("a port"));
        let with = with.to_vec();
        let (to, asked) = std::sync::mpsc::channel();
        // Where fewer requests come, it waits until the tests end.
        std::thread::spawn(move || {
            for status in with {
                let mut stream = BufReader::new(listens.accept().expect("a connection").0);
                let (mut first, mut length) = (String::new(), 0);
                stream.read_line(&mut first).expect("a request");
                loop {
                    let mut line = String::new();
                    stream.read_line(&mut line).expect("a header");
                    let line = line.to_ascii_lowercase();
                    if let Some(bytes) = line.strip_prefix("content-length:") {
                        length = bytes.trim().parse().expect("a length");
                    }
                    if line.trim().is_empty() {
                        break;
                    }
                }
                stream.read_exact(&mut vec![0; length]).expect("a body");
                let first = first.trim_end_matches("\r\n").trim_end_matches(" HTTP/1.1");
                to.send(first.to_owned()).expect("a test");
                let says = format!(
                    "HTTP/1.1 {status} so\r\nETag: \"1\"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                );
                stream.get_mut().write_all(says.as_bytes()).expect("an answer");
            }
        });
        (base, asked)
    }

    fn puts(base: &str) -> Result<(), Error> {
        let name = format!("{base}/new/job/a.gtr");
        let place = Place::of(Path::new(&name))?;
        wait(&name, place.put(PutPayload::from_static(b"trace")))
    }

    #[test]
    fn a_folder_that_another_makes_at_this_moment_is_taken() {
        let (base, asked) = answers(&[409, 409, 405, 409, 405, 201]);
        puts(&base).expect("it is sent in the end");
        let put = "PUT /new/job/a.gtr";
        let all = [put, "MKCOL /new/job", "MKCOL /new", put, "MKCOL /new/job", put];
        assert_eq!(asked.try_iter().collect::<Vec<_>>(), all);
    }

    #[test]
    fn a_server_that_takes_no_objects_is_not_asked_for_ever() {
        let (base, asked) = answers(&[405; 4]);
        let error = puts(&base).expect_err("no");
        assert!(error.to_string().contains("405 Method Not Allowed"), "{error}");
        assert_eq!(asked.try_iter().count(), 4);
    }

    #[test]
    fn a_refusal_in_xml_is_one_line() {
        let said =
            "<?xml?><Error><Code>AccessDenied</Code><Message>Forbidden: Garage\nsays</Message></Error>";
        assert_eq!(in_tag(said, "Message").as_deref(), Some("Forbidden: Garage\nsays"));
        assert_eq!(first_line("one\ntwo"), "one");
    }
}

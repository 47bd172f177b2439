//! `gputrace who` against PyTorch's own history: a snapshot's rows, read by Python's own `pickle`.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Ten addresses of a snapshot that had most owners, of different pools and streams as far as there are, and all their owners as the rows say: address,
/// requested bytes, stream, and the times at which it was handed out and taken back, in microseconds.
const HISTORY: &str = "
import gzip, json, pickle, sys
from collections import defaultdict
snapshot = pickle.load(gzip.open(sys.argv[1]))
(rows,) = [rows for rows in snapshot['device_traces'] if rows]
lives, open_ = [], {}
for row in rows:
    if row['action'] == 'alloc':
        life = open_[row['addr']] = [row['addr'], row['size'], row['stream'], row['time_us'], None]
        lives.append(life)
    elif row['action'] == 'free_requested' and row['addr'] in open_:
        open_.pop(row['addr'])[4] = row['time_us']
by_address = defaultdict(list)
for life in lives:
    by_address[life[0]].append(life)
kinds = defaultdict(list)
for address, own in by_address.items():
    kinds[own[0][2]].append((len(own), address))
asked = []
for candidates in kinds.values():
    candidates.sort(reverse=True)
    asked += [address for _, address in candidates[:max(1, 10 // len(kinds))]]
asked += [address for _, address in sorted(((len(own), a) for a, own in by_address.items()), reverse=True) if address not in asked]
answer = []
for address in asked[:10]:
    own = [life for life in lives if life[0] <= address < life[0] + life[1]]
    answer.append({'address': address, 'owners': own})
print(json.dumps(answer))
";

/// What PyTorch's own rows say.
fn history(snapshot: &Path) -> Vec<Value> {
    let output = Command::new("python3").args(["-c", HISTORY]).arg(snapshot).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn who(address: u64, trace: &Path) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_gputrace"))
        .args(["who", "--json", &format!("{address:#x}")])
        .arg(trace)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn owners_are_those_of_pytorchs_own_history() {
    let folder = repository().join("tests/groundtruth");
    let (mut n_addresses, mut n_owners) = (0, 0);
    for name in ["streams", "mempool", "graph_train", "empty_cache", "unet_multires"] {
        let snapshot = folder.join(format!("{name}.default.pickle.gz"));
        for asked in history(&snapshot) {
            let address = asked["address"].as_u64().unwrap();
            let json = who(address, &snapshot);
            let rows = json["processes"][0]["sections"].as_array().unwrap();
            let section = rows.iter().find(|it| it["name"] == "owners_of_address").unwrap();
            // The rows say what was requested. What a block was rounded up to is known to us alone.
            let is_asked = |row: &&Value| {
                row["what"] == "block" && row["offset_bytes"].as_u64() < row["requested_bytes"].as_u64()
            };
            let blocks: Vec<&Value> = section["owners"].as_array().unwrap().iter().filter(is_asked).collect();
            let found: Vec<(String, u64)> = blocks
                .iter()
                .filter(|row| !row["since_ns"].is_null())
                .map(|row| {
                    (row["address"].as_str().unwrap().to_owned(), row["requested_bytes"].as_u64().unwrap())
                })
                .collect();
            let expected: Vec<(String, u64)> = asked["owners"]
                .as_array()
                .unwrap()
                .iter()
                .map(|life| (format!("{:#x}", life[0].as_u64().unwrap()), life[1].as_u64().unwrap()))
                .collect();
            assert_eq!(found, expected, "{name} {address:#x}");
            for (row, life) in blocks.iter().zip(asked["owners"].as_array().unwrap()) {
                let stream = life[2].as_u64().unwrap();
                assert_eq!(row["stream"], json!(format!("{stream:#x}")), "{name} {address:#x}");
                assert_eq!(row["until_ns"].is_null(), life[4].is_null(), "{name} {address:#x}: {row}");
                // Times count from the first event: how long it was held is the same.
                if let (Some(since), Some(until), Some(free)) =
                    (row["since_ns"].as_u64(), row["until_ns"].as_u64(), life[4].as_u64())
                {
                    let held = (free - life[3].as_u64().unwrap()) * 1000;
                    assert_eq!(until - since, held, "{name} {address:#x}: {row}");
                }
            }
            n_addresses += 1;
            n_owners += blocks.len();
        }
    }
    assert!(n_addresses >= 50 && n_owners > 100, "{n_addresses} addresses, {n_owners} owners");
}

#[test]
fn an_address_of_a_graph_names_its_pool_and_one_beside_everything_its_neighbours() {
    let trace = repository().join("tests/golden/pools/graphs.gtr");
    let json = who(0x7f3a_c560_0100, &trace);
    let sections = json["processes"][0]["sections"].as_array().unwrap();
    let section = sections.iter().find(|it| it["name"] == "owners_of_address").unwrap();
    let owners = section["owners"].as_array().unwrap();
    let last = owners.last().unwrap();
    assert_eq!((&last["what"], &last["pool"]), (&json!("block"), &json!("CUDA graph 1")), "{last}");
    assert!(owners.iter().any(|row| row["what"] == "segment" && !row["until_ns"].is_null()), "{owners:?}");
    let made = owners.iter().filter_map(|row| row["made_by"].as_str());
    assert!(made.into_iter().all(|place| place.contains("graphs.py:")), "{owners:?}");
    // The capture asked for it. Blocks of the default pool that had the address before belong to no graph.
    assert_eq!(last["graph"], json!("graph 1, destroyed"), "{last}");
    let n_captured = owners.iter().filter(|row| !row["graph"].is_null()).count();
    assert_eq!((n_captured, owners.len() > 5), (1, true), "{owners:?}");
    let nowhere = who(0x10, &trace);
    let text = nowhere.to_string();
    assert!(text.contains("no recorded allocation contained or was near this address"), "{text}");
}

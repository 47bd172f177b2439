//! Pickles as Python writes them, made of what the tests of snapshots need.

/// What a pickle is made of.
#[allow(dead_code, reason = "each test uses some of it")]
#[derive(Clone)]
pub(crate) enum Item {
    None,
    Int(i64),
    Text(&'static str),
    List(Vec<Item>),
    Dict(Vec<(&'static str, Item)>),
    Pair(i64, i64),
}

pub(crate) fn pickle(item: &Item, out: &mut Vec<u8>) {
    match item {
        Item::None => out.push(b'N'),
        Item::Int(value) => {
            out.extend([0x8a, 8]);
            out.extend(value.to_le_bytes());
        }
        Item::Text(text) => {
            out.extend([0x8c, text.len() as u8]);
            out.extend(text.as_bytes());
        }
        Item::List(items) => {
            out.extend(b"](");
            items.iter().for_each(|item| pickle(item, out));
            out.push(b'e');
        }
        Item::Dict(items) => {
            out.extend(b"}(");
            for (key, value) in items {
                pickle(&Item::Text(key), out);
                pickle(value, out);
            }
            out.push(b'u');
        }
        Item::Pair(first, second) => {
            for value in [first, second] {
                out.push(b'K');
                out.push(*value as u8);
            }
            out.push(0x86);
        }
    }
}

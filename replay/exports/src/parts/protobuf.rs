//! Protocol buffers, as far as the exports need them: field number and wire type, then a varint or a length and bytes
//! (<https://protobuf.dev/programming-guides/encoding/>).

/// A message, as bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Message(pub(crate) Vec<u8>);

impl Message {
    /// A bare number.
    pub(crate) fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    /// A number; 0 is what a missing one is.
    pub(crate) fn number(&mut self, field: u64, value: u64) {
        if value != 0 {
            self.varint(field << 3);
            self.varint(value);
        }
    }

    /// A text, or a message in this one.
    pub(crate) fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    /// A list of numbers.
    pub(crate) fn packed(&mut self, field: u64, values: &[u64]) {
        let mut inside = Message::default();
        values.iter().for_each(|value| inside.varint(*value));
        self.bytes(field, &inside.0);
    }
}

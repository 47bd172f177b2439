//! `trace.fbs` in Rust: one line a field, in the order of the schema, which is the layout.
//!
//! Written by hand over the `flatbuffers` crate's own reader, verifier and builder, because every table here is the
//! same simple thing (columns of scalars), and because a reader of this file then sees the format. `tests/schema.rs`
//! compares it with `trace.fbs`, field by field.
#![allow(unsafe_code)] // The crate's `Table::get` and `Follow` are unsafe; the macro below is the only place that calls them.

use flatbuffers::{
    FlatBufferBuilder, Follow, ForwardsUOffset, InvalidFlatbuffer, Push, Table, TableFinishedWIPOffset,
    UnionWIPOffset, VOffsetT, Vector, VectorIter, Verifiable, Verifier, VerifierOptions, WIPOffset,
};

/// A vector of scalars.
type Column<'a, T> = ForwardsUOffset<Vector<'a, T>>;
/// A vector of texts.
type Texts<'a> = ForwardsUOffset<Vector<'a, ForwardsUOffset<&'a str>>>;
/// Another table.
type Nested<T> = ForwardsUOffset<T>;

/// What goes into one field of a table that is being built.
pub(crate) enum Field {
    Absent,
    U32(u32),
    U64(u64),
    At(WIPOffset<UnionWIPOffset>),
}

/// A column to build; an empty or all-zero one is left out.
pub(crate) fn column<T: Push<Output = T> + Copy + PartialEq + Default + 'static>(
    to: &mut FlatBufferBuilder<'_>,
    rows: &[T],
) -> Field {
    if rows.iter().all(|row| *row == T::default()) {
        return Field::Absent;
    }
    Field::At(to.create_vector(rows).as_union_value())
}

/// A column that says how many rows there are: left out only if there are none.
pub(crate) fn keys<T: Push<Output = T> + Copy + 'static>(
    to: &mut FlatBufferBuilder<'_>,
    rows: &[T],
) -> Field {
    if rows.is_empty() { Field::Absent } else { Field::At(to.create_vector(rows).as_union_value()) }
}

/// A vector of texts to build.
pub(crate) fn texts(to: &mut FlatBufferBuilder<'_>, rows: &[impl AsRef<str>]) -> Field {
    if rows.is_empty() {
        return Field::Absent;
    }
    let rows: Vec<_> = rows.iter().map(|row| to.create_string(row.as_ref())).collect();
    Field::At(to.create_vector(&rows).as_union_value())
}

/// A finished table as a field.
pub(crate) fn nested(table: WIPOffset<TableFinishedWIPOffset>) -> Field {
    Field::At(table.as_union_value())
}

/// Reads a column row by row; zeros where it is absent or too short.
pub(crate) struct Rows<'a, T: Follow<'a>>(Option<VectorIter<'a, T>>);

impl<'a, T: Follow<'a, Inner = T> + Default + 'a> Rows<'a, T> {
    pub(crate) fn next(&mut self) -> T {
        self.0.as_mut().and_then(Iterator::next).unwrap_or_default()
    }
}

/// The rows of a column.
pub(crate) fn rows<'a, T: Follow<'a>>(column: Option<Vector<'a, T>>) -> Rows<'a, T> {
    Rows(column.map(|column| column.iter()))
}

/// A table that can be the root of a payload.
pub(crate) trait Root<'a>: Follow<'a, Inner = Self> + Verifiable + Sized + 'a {
    /// Looks at bytes that may be anything.
    fn parse(bytes: &'a [u8]) -> Result<Self, String> {
        let options = VerifierOptions {
            max_depth: 4,
            max_tables: 64,
            // Offsets may share what they point to; this bounds what it unfolds to.
            max_apparent_size: bytes.len().saturating_mul(4),
            ..VerifierOptions::default()
        };
        let parsed = flatbuffers::root_with_opts::<Self>(&options, bytes);
        parsed.map_err(|error| {
            format!("not a FlatBuffer of the schema ({})", error.to_string().trim().replace('\n', "; "))
        })
    }
}

macro_rules! tables {
    ($( $name:ident, $fields:ident { $( $field:ident: $type:ty, )* } )*) => {
        $(
            /// See `trace.fbs`.
            #[derive(Clone, Copy)]
            pub(crate) struct $name<'a>(Table<'a>);

            /// The fields of a new table.
            pub(crate) struct $fields { $( pub(crate) $field: Field, )* }

            impl<'a> Root<'a> for $name<'a> {}

            impl<'a> Follow<'a> for $name<'a> {
                type Inner = Self;
                unsafe fn follow(buf: &'a [u8], loc: usize) -> Self {
                    // SAFETY: the caller has verified that a table is at `loc`.
                    $name(unsafe { Table::new(buf, loc) })
                }
            }

            impl<'a> Verifiable for $name<'a> {
                fn run_verifier(verifier: &mut Verifier<'_, '_>, pos: usize) -> Result<(), InvalidFlatbuffer> {
                    tables!(@verify verifier, pos, 'a, 4 as VOffsetT, $( $field: $type, )*);
                    Ok(())
                }
            }

            impl<'a> $name<'a> {
                tables!(@get 'a, $( $field: $type, )*);

                /// Names of the fields, in the order of their slots.
                #[cfg(test)]
                pub(crate) const FIELDS: &'static [&'static str] = &[ $( stringify!($field), )* ];
            }

            impl $fields {
                pub(crate) fn build(self, to: &mut FlatBufferBuilder<'_>) -> WIPOffset<TableFinishedWIPOffset> {
                    let table = to.start_table();
                    let mut slot: VOffsetT = 4;
                    $(
                        match self.$field {
                            Field::Absent => {}
                            Field::U32(value) => to.push_slot::<u32>(slot, value, 0),
                            Field::U64(value) => to.push_slot::<u64>(slot, value, 0),
                            Field::At(offset) => to.push_slot_always(slot, offset),
                        }
                        slot += 2;
                    )*
                    let _ = slot;
                    to.end_table(table)
                }
            }
        )*

        /// Every table with its fields, for the comparison with `trace.fbs`.
        #[cfg(test)]
        pub(crate) const TABLES: &[(&str, &[&str])] = &[ $( (stringify!($name), $name::FIELDS), )* ];
    };
    (@verify $verifier:ident, $pos:ident, $life:lifetime, $slot:expr, $( $field:ident: $type:ty, )*) => {
        let mut table = $verifier.visit_table($pos)?;
        let mut slot: VOffsetT = $slot;
        $(
            table = table.visit_field::<$type>(stringify!($field), slot, false)?;
            slot += 2;
        )*
        let _ = slot;
        table.finish();
    };
    (@get $life:lifetime, $( $field:ident: $type:ty, )*) => {
        tables!(@slot $life, 4; $( $field: $type, )*);
    };
    (@slot $life:lifetime, $slot:expr;) => {};
    (@slot $life:lifetime, $slot:expr; $field:ident: $type:ty, $( $rest:ident: $rest_type:ty, )*) => {
        pub(crate) fn $field(&self) -> Option<<$type as Follow<$life>>::Inner> {
            // SAFETY: the verifier has visited this slot as this type.
            unsafe { self.0.get::<$type>($slot, None) }
        }
        tables!(@slot $life, $slot + 2; $( $rest: $rest_type, )*);
    };
}

tables! {
    Ancestors, AncestorsFields {
        pids: Column<'a, u32>,
        begans: Column<'a, u64>,
        lengths: Column<'a, u32>,
        commands: Column<'a, u32>,
    }
    Process, ProcessFields {
        pid: u32,
        parent: u32,
        host: u32,
        boot: u32,
        executable: u32,
        command: Column<'a, u32>,
        environment: Column<'a, u32>,
        rank: u64,
        start: u64,
        start_realtime: u64,
        recorder: u32,
        torch_version: u32,
        began: u64,
        ancestors: Nested<Ancestors<'a>>,
        segment: u32,
        since: u64,
        after_gap: u32,
    }
    Modules, ModulesFields {
        ids: Column<'a, u32>,
        paths: Column<'a, u32>,
        build_ids: Column<'a, u32>,
        starts: Column<'a, u64>,
        ends: Column<'a, u64>,
        biases: Column<'a, u64>,
        flags: Column<'a, u8>,
    }
    Frames, FramesFields {
        ids: Column<'a, u32>,
        flags: Column<'a, u8>,
        addresses: Column<'a, u64>,
        modules: Column<'a, u32>,
        functions: Column<'a, u32>,
        files: Column<'a, u32>,
        lines: Column<'a, u32>,
    }
    Stacks, StacksFields {
        ids: Column<'a, u32>,
        lengths: Column<'a, u32>,
        frames: Column<'a, u32>,
        flags: Column<'a, u8>,
        nodes: Column<'a, u32>,
        forwards: Column<'a, u32>,
        callers: Column<'a, u32>,
    }
    Threads, ThreadsFields {
        ids: Column<'a, u32>,
        tids: Column<'a, u32>,
        names: Column<'a, u32>,
    }
    Devices, DevicesFields {
        ordinals: Column<'a, i16>,
        names: Column<'a, u32>,
        uuids: Column<'a, u32>,
        totals: Column<'a, u64>,
    }
    Apis, ApisFields {
        ids: Column<'a, u32>,
        names: Column<'a, u32>,
        runtime_names: Column<'a, u32>,
    }
    Communicators, CommunicatorsFields {
        ids: Column<'a, u32>,
        origins: Column<'a, u8>,
        calls: Column<'a, u64>,
        handles: Column<'a, u64>,
        unique_ids: Column<'a, u64>,
        comm_hashes: Column<'a, u64>,
        flags: Column<'a, u8>,
        ranks: Column<'a, u64>,
        n_ranks: Column<'a, u64>,
        devices: Column<'a, i16>,
        parents: Column<'a, u32>,
        ordinals: Column<'a, u32>,
        colors: Column<'a, i32>,
        keys: Column<'a, i32>,
        versions: Column<'a, u32>,
        names: Column<'a, u32>,
        net_names: Column<'a, u32>,
        config: Column<'a, i32>,
    }
    TextDefinitions, TextDefinitionsFields {
        ids: Column<'a, u32>,
        texts: Column<'a, u32>,
    }
    Definitions, DefinitionsFields {
        strings: Texts<'a>,
        process: Nested<Process<'a>>,
        modules: Nested<Modules<'a>>,
        frames: Nested<Frames<'a>>,
        stacks: Nested<Stacks<'a>>,
        threads: Nested<Threads<'a>>,
        devices: Nested<Devices<'a>>,
        apis: Nested<Apis<'a>>,
        communicators: Nested<Communicators<'a>>,
        texts: Nested<TextDefinitions<'a>>,
    }
    Calls, CallsFields {
        apis: Column<'a, u32>,
        actions: Column<'a, u8>,
        devices: Column<'a, i16>,
        flags: Column<'a, u8>,
        results: Column<'a, i32>,
        addresses: Column<'a, u64>,
        bytes: Column<'a, u64>,
        streams: Column<'a, u64>,
        handles: Column<'a, u64>,
        extras: Column<'a, u64>,
        durations: Column<'a, u64>,
        comms: Column<'a, u32>,
        nccl_calls: Column<'a, u64>,
    }
    BlockAllocs, BlockAllocsFields {
        devices: Column<'a, i16>,
        addresses: Column<'a, u64>,
        bytes: Column<'a, u64>,
        flags: Column<'a, u8>,
        requested: Column<'a, u64>,
        streams: Column<'a, u64>,
        allocated: Column<'a, u64>,
        reserved: Column<'a, u64>,
    }
    BlockFrees, BlockFreesFields {
        devices: Column<'a, i16>,
        addresses: Column<'a, u64>,
        bytes: Column<'a, u64>,
        allocated: Column<'a, u64>,
        reserved: Column<'a, u64>,
        flags: Column<'a, u8>,
    }
    BlockOoms, BlockOomsFields {
        devices: Column<'a, i16>,
        bytes: Column<'a, u64>,
        flags: Column<'a, u8>,
        requested: Column<'a, u64>,
        allocated: Column<'a, u64>,
        reserved: Column<'a, u64>,
        streams: Column<'a, u64>,
    }
    Waits, WaitsFields {
        events: Column<'a, u64>,
        streams: Column<'a, u64>,
        actions: Column<'a, u8>,
        results: Column<'a, i32>,
    }
    Samples, SamplesFields {
        devices: Column<'a, i16>,
        process_used: Column<'a, u64>,
        device_used: Column<'a, u64>,
        totals: Column<'a, u64>,
    }
    Losses, LossesFields {
        causes: Column<'a, u8>,
        events: Column<'a, u64>,
    }
    NcclEnters, NcclEntersFields {
        apis: Column<'a, u32>,
        ops: Column<'a, u8>,
        calls: Column<'a, u64>,
        comms: Column<'a, u32>,
        sequences: Column<'a, u64>,
        groups: Column<'a, u32>,
        group_depths: Column<'a, u32>,
        counts: Column<'a, u64>,
        datatypes: Column<'a, u32>,
        redops: Column<'a, u64>,
        redop_calls: Column<'a, u64>,
        peers: Column<'a, u64>,
        sends: Column<'a, u64>,
        receives: Column<'a, u64>,
        streams: Column<'a, u64>,
        handles: Column<'a, u64>,
        extras: Column<'a, u64>,
        flags: Column<'a, u8>,
    }
    NcclExits, NcclExitsFields {
        calls: Column<'a, u64>,
        results: Column<'a, i32>,
        values: Column<'a, u64>,
        durations: Column<'a, u64>,
        timed: Column<'a, u8>,
    }
    NcclTimings, NcclTimingsFields {
        calls: Column<'a, u64>,
        comms: Column<'a, u32>,
        timelines: Column<'a, u32>,
        streams: Column<'a, u64>,
        starts: Column<'a, u64>,
        durations: Column<'a, u64>,
    }
    Pjrts, PjrtsFields {
        actions: Column<'a, u8>,
        origins: Column<'a, u8>,
        devices: Column<'a, i16>,
        buffers: Column<'a, u64>,
        executables: Column<'a, u64>,
        bytes: Column<'a, u64>,
        codes: Column<'a, i32>,
        texts: Column<'a, u32>,
    }
    PjrtExecutables, PjrtExecutablesFields {
        executables: Column<'a, u64>,
        names: Column<'a, u32>,
        temporary: Column<'a, u64>,
        arguments: Column<'a, u64>,
        outputs: Column<'a, u64>,
        aliased: Column<'a, u64>,
        code: Column<'a, u64>,
    }
    Marks, MarksFields {
        actions: Column<'a, u8>,
        texts: Column<'a, u32>,
        domains: Column<'a, u32>,
        ranges: Column<'a, u64>,
        categories: Column<'a, u32>,
    }
    Events, EventsFields {
        kinds: Column<'a, u8>,
        times: Column<'a, u64>,
        threads: Column<'a, u32>,
        stacks: Column<'a, u32>,
        calls: Nested<Calls<'a>>,
        allocs: Nested<BlockAllocs<'a>>,
        frees: Nested<BlockFrees<'a>>,
        ooms: Nested<BlockOoms<'a>>,
        waits: Nested<Waits<'a>>,
        samples: Nested<Samples<'a>>,
        losses: Nested<Losses<'a>>,
        notes: Texts<'a>,
        nccl_enters: Nested<NcclEnters<'a>>,
        nccl_exits: Nested<NcclExits<'a>>,
        marks: Nested<Marks<'a>>,
        nccl_timings: Nested<NcclTimings<'a>>,
        pjrts: Nested<Pjrts<'a>>,
        pjrt_executables: Nested<PjrtExecutables<'a>>,
    }
    Mappings, MappingsFields {
        times: Column<'a, u64>,
        lengths: Column<'a, u32>,
        gaps: Column<'a, u64>,
        sizes: Column<'a, u64>,
    }
    Index, IndexFields {
        offsets: Column<'a, u64>,
        lengths: Column<'a, u64>,
        kinds: Column<'a, u8>,
        counts: Column<'a, u32>,
        first_times: Column<'a, u64>,
        last_times: Column<'a, u64>,
    }
}

#[cfg(test)]
mod tests {
    use super::TABLES;

    #[test]
    fn the_tables_here_are_those_of_the_schema_file() {
        let schema = include_str!("../trace.fbs");
        let lines = schema.lines().map(|line| line.split("//").next().unwrap_or_default().trim());
        let mut found: Vec<(&str, Vec<&str>)> = Vec::new();
        for line in lines {
            if let Some(rest) = line.strip_prefix("table ") {
                found.push((rest.trim_end_matches(['{', ' ']), Vec::new()));
            } else if let Some((field, _)) = line.split_once(':') {
                found.last_mut().expect("a field outside of a table").1.push(field);
            }
        }
        let ours: Vec<_> = TABLES.iter().map(|(name, fields)| (*name, fields.to_vec())).collect();
        assert_eq!(ours, found, "append new fields to both, in the same order");
    }
}

//! Definitions and mappings as columns, and back. `trace.fbs` says what each column holds.

use crate::event::{
    Ancestor, Api, ApiId, Backward, Bytes, CommConfig, CommId, Communicator, Device, Frame, FrameId, Mapping,
    Mappings, Module, ModuleId, Nanos, NcclOp, Process, Stack, StackId, TextId, Thread, ThreadId,
};
use crate::tables::{
    self, AncestorsFields, ApisFields, CommunicatorsFields, DefinitionsFields, DevicesFields, Field,
    FramesFields, MappingsFields, ModulesFields, ProcessFields, Root, StacksFields, TextDefinitionsFields,
    ThreadsFields, column, keys, nested, rows, texts,
};
use flatbuffers::FlatBufferBuilder;
use std::collections::HashMap;

const HAS_RUNTIME: u8 = 1;
const PYTHON: u8 = 1;
const INLINED: u8 = 2;
const TRUNCATED: u8 = 1;
const HAS_HASH: u8 = 1;
const HAS_COLOR: u8 = 2;
/// A field of `ncclConfig_t` that leaves the choice to NCCL (NCCL_CONFIG_UNDEF_INT, nccl.h 2.28).
const UNDEFINED: i32 = i32::MIN;
const CALLER_INFERRED: u8 = 2;
/// Most ids that a definition may leave out: what a lost block of definitions explains. More is hostile.
const MAX_GAP: usize = 1 << 20;

/// Definitions that wait to become a block.
#[derive(Default)]
pub(crate) struct Pending {
    process: Option<Process>,
    modules: Vec<(ModuleId, Module)>,
    frames: Vec<(FrameId, Frame)>,
    stacks: Vec<(StackId, Stack)>,
    threads: Vec<(ThreadId, Thread)>,
    devices: Vec<Device>,
    apis: Vec<(ApiId, Api)>,
    communicators: Vec<(CommId, Communicator)>,
    texts: Vec<(TextId, String)>,
    rows: usize,
    bytes: usize,
}

impl Pending {
    /// Definitions in it.
    pub(crate) fn len(&self) -> usize {
        self.rows
    }

    /// About how many bytes they take.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    fn grow(&mut self, bytes: usize) {
        self.rows += 1;
        self.bytes += 64 + bytes;
    }

    pub(crate) fn process(&mut self, process: &Process) {
        let ancestors = process.ancestors.iter().flat_map(|ancestor| &ancestor.command);
        let words = process
            .command
            .iter()
            .chain(ancestors)
            .chain(process.environment.iter().flat_map(|(name, value)| [name, value]));
        self.grow(words.map(|word| word.len() + 16).sum());
        self.process = Some(process.clone());
    }

    pub(crate) fn module(&mut self, id: ModuleId, module: &Module) {
        self.grow(module.path.len() + module.build_id.len());
        self.modules.push((id, module.clone()));
    }

    pub(crate) fn frame(&mut self, id: FrameId, frame: &Frame) {
        let (Frame::Native { function, file, .. } | Frame::Python { function, file, .. }) = frame;
        self.grow(function.len() + file.len());
        self.frames.push((id, frame.clone()));
    }

    pub(crate) fn stack(&mut self, id: StackId, stack: &Stack) {
        self.grow(stack.frames.len() * 4);
        self.stacks.push((id, stack.clone()));
    }

    pub(crate) fn thread(&mut self, id: ThreadId, thread: &Thread) {
        self.grow(thread.name.len());
        self.threads.push((id, thread.clone()));
    }

    pub(crate) fn device(&mut self, device: &Device) {
        self.grow(device.name.len() + device.uuid.len());
        self.devices.push(device.clone());
    }

    pub(crate) fn api(&mut self, id: ApiId, api: &Api) {
        self.grow(api.name.len() + api.runtime_name.len());
        self.apis.push((id, api.clone()));
    }

    pub(crate) fn communicator(&mut self, id: CommId, communicator: &Communicator) {
        self.grow(128 + communicator.config.name.len() + communicator.config.net_name.len());
        self.communicators.push((id, communicator.clone()));
    }

    pub(crate) fn text(&mut self, id: TextId, text: &str) {
        self.grow(text.len());
        self.texts.push((id, text.to_owned()));
    }

    pub(crate) fn build(&self, to: &mut FlatBufferBuilder<'_>) {
        let mut strings = Strings::default();
        let fields = DefinitionsFields {
            process: self
                .process
                .as_ref()
                .map_or(Field::Absent, |process| build_process(process, &mut strings, to)),
            modules: build_modules(&self.modules, &mut strings, to),
            frames: build_frames(&self.frames, &mut strings, to),
            stacks: build_stacks(&self.stacks, &mut strings, to),
            threads: build_threads(&self.threads, &mut strings, to),
            devices: build_devices(&self.devices, &mut strings, to),
            apis: build_apis(&self.apis, &mut strings, to),
            texts: build_texts(&self.texts, &mut strings, to),
            communicators: build_communicators(&self.communicators, &mut strings, to),
            strings: texts(to, &strings.texts),
        };
        let root = fields.build(to);
        to.finish_minimal(root);
    }
}

/// Each text of a block once; number 0 is the empty one.
struct Strings<'a> {
    texts: Vec<&'a str>,
    numbers: HashMap<&'a str, u32>,
}

impl Default for Strings<'_> {
    fn default() -> Self {
        Strings { texts: vec![""], numbers: HashMap::from([("", 0)]) }
    }
}

impl<'a> Strings<'a> {
    fn number(&mut self, text: &'a str) -> u32 {
        *self.numbers.entry(text).or_insert_with(|| {
            self.texts.push(text);
            self.texts.len() as u32 - 1
        })
    }
}

fn build_process<'a>(
    process: &'a Process,
    strings: &mut Strings<'a>,
    to: &mut FlatBufferBuilder<'_>,
) -> Field {
    let command: Vec<u32> = process.command.iter().map(|word| strings.number(word)).collect();
    let environment: Vec<u32> = process
        .environment
        .iter()
        .flat_map(|(name, value)| [strings.number(name), strings.number(value)])
        .collect();
    let ancestors = build_ancestors(&process.ancestors, strings, to);
    let fields = ProcessFields {
        pid: Field::U32(process.pid),
        parent: Field::U32(process.parent),
        host: Field::U32(strings.number(&process.host)),
        boot: Field::U32(strings.number(&process.boot)),
        executable: Field::U32(strings.number(&process.executable)),
        command: keys(to, &command),
        environment: keys(to, &environment),
        rank: Field::U64(process.rank.map_or(0, |rank| u64::from(rank) + 1)),
        start: Field::U64(process.start.0),
        start_realtime: Field::U64(process.start_realtime),
        recorder: Field::U32(strings.number(&process.recorder)),
        torch_version: Field::U32(
            process.torch_version.as_ref().map_or(0, |version| strings.number(version) + 1),
        ),
        began: Field::U64(process.began),
        ancestors,
        segment: Field::U32(process.segment),
        since: Field::U64(process.since.0),
        after_gap: Field::U32(process.after_gap.into()),
    };
    nested(fields.build(to))
}

fn build_ancestors<'a>(
    ancestors: &'a [Ancestor],
    strings: &mut Strings<'a>,
    to: &mut FlatBufferBuilder<'_>,
) -> Field {
    let words = ancestors.iter().flat_map(|ancestor| &ancestor.command);
    let commands: Vec<u32> = words.map(|word| strings.number(word)).collect();
    let fields = AncestorsFields {
        pids: keys(to, &each(ancestors, |ancestor| ancestor.pid)),
        begans: column(to, &each(ancestors, |ancestor| ancestor.began)),
        lengths: column(to, &each(ancestors, |ancestor| ancestor.command.len() as u32)),
        commands: keys(to, &commands),
    };
    nested(fields.build(to))
}

/// One column: a number of each row.
fn each<'a, R, T>(of: &'a [R], number: impl FnMut(&'a R) -> T) -> Vec<T> {
    of.iter().map(number).collect()
}

fn build_modules<'a>(
    modules: &'a [(ModuleId, Module)],
    strings: &mut Strings<'a>,
    to: &mut FlatBufferBuilder<'_>,
) -> Field {
    let paths: Vec<u32> = modules.iter().map(|(_, module)| strings.number(&module.path)).collect();
    let build_ids: Vec<u32> = modules.iter().map(|(_, module)| strings.number(&module.build_id)).collect();
    let fields = ModulesFields {
        ids: keys(to, &each(modules, |(id, _)| id.0)),
        paths: column(to, &paths),
        build_ids: column(to, &build_ids),
        starts: column(to, &each(modules, |(_, module)| module.start)),
        ends: column(to, &each(modules, |(_, module)| module.end)),
        biases: column(to, &each(modules, |(_, module)| module.bias)),
        flags: column(to, &each(modules, |(_, module)| if module.has_runtime { HAS_RUNTIME } else { 0 })),
    };
    nested(fields.build(to))
}

fn build_frames<'a>(
    frames: &'a [(FrameId, Frame)],
    strings: &mut Strings<'a>,
    to: &mut FlatBufferBuilder<'_>,
) -> Field {
    let mut columns = (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (_, frame) in frames {
        let (flags, at, in_module, name, path, number) = match frame {
            Frame::Native { address, module, function, file, line, inlined } => {
                let flags = if *inlined { INLINED } else { 0 };
                (
                    flags,
                    *address,
                    module.map_or(0, |module| module.0.saturating_add(1)),
                    function,
                    file,
                    *line,
                )
            }
            Frame::Python { function, file, line } => (PYTHON, 0, 0, function, file, *line),
        };
        columns.0.push(flags);
        columns.1.push(at);
        columns.2.push(in_module);
        columns.3.push(strings.number(name));
        columns.4.push(strings.number(path));
        columns.5.push(number);
    }
    let fields = FramesFields {
        ids: keys(to, &each(frames, |(id, _)| id.0)),
        flags: column(to, &columns.0),
        addresses: column(to, &columns.1),
        modules: column(to, &columns.2),
        functions: column(to, &columns.3),
        files: column(to, &columns.4),
        lines: column(to, &columns.5),
    };
    nested(fields.build(to))
}

fn build_stacks<'a>(
    stacks: &'a [(StackId, Stack)],
    strings: &mut Strings<'a>,
    to: &mut FlatBufferBuilder<'_>,
) -> Field {
    let frames: Vec<u32> =
        stacks.iter().flat_map(|(_, stack)| stack.frames.iter().map(|frame| frame.0)).collect();
    let backward: Vec<Option<&Backward>> = each(stacks, |(_, stack)| stack.backward.as_deref());
    let nodes: Vec<u32> = each(&backward, |it| it.map_or(0, |it| strings.number(&it.node)));
    let flags = |stack: &Stack| {
        let is_inferred = stack.backward.as_ref().is_some_and(|backward| backward.is_caller_inferred);
        (if stack.truncated { TRUNCATED } else { 0 }) | (if is_inferred { CALLER_INFERRED } else { 0 })
    };
    let fields = StacksFields {
        ids: keys(to, &each(stacks, |(id, _)| id.0)),
        lengths: column(to, &each(stacks, |(_, stack)| stack.frames.len() as u32)),
        frames: keys(to, &frames),
        flags: column(to, &each(stacks, |(_, stack)| flags(stack))),
        nodes: column(to, &nodes),
        forwards: column(to, &each(&backward, |it| it.map_or(0, |it| it.forward.0))),
        callers: column(to, &each(&backward, |it| it.map_or(0, |it| it.caller.0))),
    };
    nested(fields.build(to))
}

fn build_threads<'a>(
    threads: &'a [(ThreadId, Thread)],
    strings: &mut Strings<'a>,
    to: &mut FlatBufferBuilder<'_>,
) -> Field {
    let names: Vec<u32> = threads.iter().map(|(_, thread)| strings.number(&thread.name)).collect();
    let fields = ThreadsFields {
        ids: keys(to, &each(threads, |(id, _)| id.0)),
        tids: column(to, &each(threads, |(_, thread)| thread.tid)),
        names: column(to, &names),
    };
    nested(fields.build(to))
}

fn build_devices<'a>(
    devices: &'a [Device],
    strings: &mut Strings<'a>,
    to: &mut FlatBufferBuilder<'_>,
) -> Field {
    let names: Vec<u32> = devices.iter().map(|device| strings.number(&device.name)).collect();
    let uuids: Vec<u32> = devices.iter().map(|device| strings.number(&device.uuid)).collect();
    let fields = DevicesFields {
        ordinals: keys(to, &each(devices, |device| device.ordinal)),
        names: column(to, &names),
        uuids: column(to, &uuids),
        totals: column(to, &each(devices, |device| device.total.0)),
    };
    nested(fields.build(to))
}

fn build_apis<'a>(
    apis: &'a [(ApiId, Api)],
    strings: &mut Strings<'a>,
    to: &mut FlatBufferBuilder<'_>,
) -> Field {
    let names: Vec<u32> = apis.iter().map(|(_, api)| strings.number(&api.name)).collect();
    let runtime_names: Vec<u32> = apis.iter().map(|(_, api)| strings.number(&api.runtime_name)).collect();
    let fields = ApisFields {
        ids: keys(to, &each(apis, |(id, _)| id.0)),
        names: column(to, &names),
        runtime_names: column(to, &runtime_names),
    };
    nested(fields.build(to))
}

fn build_communicators<'a>(
    rows: &'a [(CommId, Communicator)],
    strings: &mut Strings<'a>,
    to: &mut FlatBufferBuilder<'_>,
) -> Field {
    let names: Vec<u32> = rows.iter().map(|(_, comm)| strings.number(&comm.config.name)).collect();
    let net_names: Vec<u32> = rows.iter().map(|(_, comm)| strings.number(&comm.config.net_name)).collect();
    let config: Vec<i32> = rows.iter().flat_map(|(_, comm)| config_numbers(&comm.config)).collect();
    let optional = |number: Option<u32>| number.map_or(0, |number| u64::from(number) + 1);
    let flags = |comm: &Communicator| {
        (if comm.comm_hash.is_some() { HAS_HASH } else { 0 })
            | (if comm.color.is_some() { HAS_COLOR } else { 0 })
    };
    let fields = CommunicatorsFields {
        ids: keys(to, &each(rows, |(id, _)| id.0)),
        origins: column(to, &each(rows, |(_, comm)| comm.origin.map_or(0, |origin| origin as u8))),
        calls: column(to, &each(rows, |(_, comm)| comm.call)),
        handles: column(to, &each(rows, |(_, comm)| comm.handle)),
        unique_ids: column(to, &each(rows, |(_, comm)| comm.unique_id)),
        comm_hashes: column(to, &each(rows, |(_, comm)| comm.comm_hash.unwrap_or_default())),
        flags: column(to, &each(rows, |(_, comm)| flags(comm))),
        ranks: column(to, &each(rows, |(_, comm)| optional(comm.rank))),
        n_ranks: column(to, &each(rows, |(_, comm)| optional(comm.n_ranks))),
        devices: column(to, &each(rows, |(_, comm)| comm.device)),
        parents: column(to, &each(rows, |(_, comm)| comm.parent.0)),
        ordinals: column(to, &each(rows, |(_, comm)| comm.ordinal)),
        colors: column(to, &each(rows, |(_, comm)| comm.color.unwrap_or_default())),
        keys: column(to, &each(rows, |(_, comm)| comm.key.unwrap_or_default())),
        versions: column(to, &each(rows, |(_, comm)| comm.version)),
        names: column(to, &names),
        net_names: column(to, &net_names),
        config: keys(to, &config),
    };
    nested(fields.build(to))
}

/// In the order of `Communicators.config`.
fn config_numbers(config: &CommConfig) -> [i32; 8] {
    [
        config.blocking,
        config.cga_cluster_size,
        config.min_ctas,
        config.max_ctas,
        config.split_share,
        config.traffic_class,
        config.nvls_ctas,
        config.max_p2p_peers,
    ]
    .map(|field| field.unwrap_or(UNDEFINED))
}

fn build_texts<'a>(
    list: &'a [(TextId, String)],
    strings: &mut Strings<'a>,
    to: &mut FlatBufferBuilder<'_>,
) -> Field {
    let numbers: Vec<u32> = list.iter().map(|(_, text)| strings.number(text)).collect();
    let fields =
        TextDefinitionsFields { ids: keys(to, &each(list, |(id, _)| id.0)), texts: column(to, &numbers) };
    nested(fields.build(to))
}

/// Everything defined so far, by id.
#[derive(Default, Debug)]
pub(crate) struct Definitions {
    pub(crate) process: Option<Process>,
    pub(crate) modules: Vec<Module>,
    pub(crate) frames: Vec<Frame>,
    pub(crate) stacks: Vec<Stack>,
    pub(crate) threads: Vec<Thread>,
    pub(crate) devices: Vec<Device>,
    pub(crate) apis: Vec<Api>,
    pub(crate) texts: Vec<String>,
    pub(crate) communicators: Vec<Communicator>,
    /// Bytes of text and lists held.
    held: u64,
}

/// Bytes that all definitions of a trace may take in memory: thousands of times what real ones do.
const MAX_HELD: u64 = 2 << 30;

impl Definitions {
    /// Adds a payload that may be anything.
    pub(crate) fn read(&mut self, payload: &[u8]) -> Result<(), String> {
        let table = tables::Definitions::parse(payload)?;
        let mut texts = Texts { texts: table.strings().into_iter().flatten().collect(), held: self.held };
        let result = self.read_tables(&table, &mut texts);
        self.held = texts.held;
        result
    }

    fn read_tables(&mut self, table: &tables::Definitions<'_>, texts: &mut Texts<'_>) -> Result<(), String> {
        if let Some(process) = table.process() {
            self.process = Some(read_process(&process, texts)?);
        }
        if let Some(table) = table.modules() {
            self.read_modules(&table, texts)?;
        }
        if let Some(table) = table.frames() {
            self.read_frames(&table, texts)?;
        }
        if let Some(table) = table.stacks() {
            self.read_stacks(&table, texts)?;
        }
        if let Some(table) = table.threads() {
            let (mut tids, mut names) = (rows(table.tids()), rows(table.names()));
            for id in table.ids().into_iter().flatten() {
                let thread = Thread { tid: tids.next(), name: texts.get(names.next())? };
                put(&mut self.threads, id, thread, Thread::default)?;
            }
        }
        if let Some(table) = table.devices() {
            let (mut names, mut uuids, mut totals) =
                (rows(table.names()), rows(table.uuids()), rows(table.totals()));
            for ordinal in table.ordinals().into_iter().flatten() {
                let (name, uuid) = (texts.get(names.next())?, texts.get(uuids.next())?);
                let device = Device { ordinal, name, uuid, total: Bytes(totals.next()) };
                match self.devices.binary_search_by_key(&ordinal, |device| device.ordinal) {
                    Ok(at) => self.devices[at] = device,
                    Err(at) => self.devices.insert(at, device),
                }
            }
        }
        if let Some(table) = table.apis() {
            let (mut names, mut runtime_names) = (rows(table.names()), rows(table.runtime_names()));
            for id in table.ids().into_iter().flatten() {
                let api =
                    Api { name: texts.get(names.next())?, runtime_name: texts.get(runtime_names.next())? };
                put(&mut self.apis, id, api, Api::default)?;
            }
        }
        if let Some(table) = table.texts() {
            let mut numbers = rows(table.texts());
            for id in table.ids().into_iter().flatten() {
                let text = texts.get(numbers.next())?;
                put(&mut self.texts, id, text, String::new)?;
            }
        }
        if let Some(table) = table.communicators() {
            self.read_communicators(&table, texts)?;
        }
        Ok(())
    }

    fn read_communicators(
        &mut self,
        table: &tables::Communicators<'_>,
        texts: &mut Texts<'_>,
    ) -> Result<(), String> {
        let (mut origins, mut calls, mut handles) =
            (rows(table.origins()), rows(table.calls()), rows(table.handles()));
        let (mut unique_ids, mut comm_hashes, mut flags) =
            (rows(table.unique_ids()), rows(table.comm_hashes()), rows(table.flags()));
        let (mut ranks, mut n_ranks, mut devices) =
            (rows(table.ranks()), rows(table.n_ranks()), rows(table.devices()));
        let (mut parents, mut ordinals) = (rows(table.parents()), rows(table.ordinals()));
        let (mut colors, mut keys, mut versions) =
            (rows(table.colors()), rows(table.keys()), rows(table.versions()));
        let (mut names, mut net_names) = (rows(table.names()), rows(table.net_names()));
        let mut config = table.config().unwrap_or_default().iter();
        let optional = |stored: u64| stored.checked_sub(1).and_then(|number| u32::try_from(number).ok());
        if self.communicators.is_empty() {
            self.communicators.push(Communicator::default());
        }
        for id in table.ids().into_iter().flatten() {
            let flags = flags.next();
            let (comm_hash, color, key) = (comm_hashes.next(), colors.next(), keys.next());
            let mut setting = || config.next().filter(|number| *number != UNDEFINED);
            let communicator = Communicator {
                origin: NcclOp::from_u8(origins.next()),
                call: calls.next(),
                handle: handles.next(),
                unique_id: unique_ids.next(),
                comm_hash: (flags & HAS_HASH != 0).then_some(comm_hash),
                rank: optional(ranks.next()),
                n_ranks: optional(n_ranks.next()),
                device: devices.next(),
                parent: CommId(parents.next()),
                ordinal: ordinals.next(),
                color: (flags & HAS_COLOR != 0).then_some(color),
                key: (flags & HAS_COLOR != 0).then_some(key),
                version: versions.next(),
                config: CommConfig {
                    name: texts.get(names.next())?,
                    net_name: texts.get(net_names.next())?,
                    blocking: setting(),
                    cga_cluster_size: setting(),
                    min_ctas: setting(),
                    max_ctas: setting(),
                    split_share: setting(),
                    traffic_class: setting(),
                    nvls_ctas: setting(),
                    max_p2p_peers: setting(),
                },
            };
            if id == 0 {
                return Err("communicator 0 is defined, which means \"none\"".to_owned());
            }
            put(&mut self.communicators, id, communicator, Communicator::default)?;
        }
        Ok(())
    }

    fn read_modules(&mut self, table: &tables::Modules<'_>, texts: &mut Texts<'_>) -> Result<(), String> {
        let (mut paths, mut build_ids) = (rows(table.paths()), rows(table.build_ids()));
        let (mut starts, mut ends) = (rows(table.starts()), rows(table.ends()));
        let (mut biases, mut flags) = (rows(table.biases()), rows(table.flags()));
        for id in table.ids().into_iter().flatten() {
            let module = Module {
                path: texts.get(paths.next())?,
                build_id: texts.get(build_ids.next())?,
                start: starts.next(),
                end: ends.next(),
                bias: biases.next(),
                has_runtime: flags.next() & HAS_RUNTIME != 0,
            };
            put(&mut self.modules, id, module, Module::default)?;
        }
        Ok(())
    }

    fn read_frames(&mut self, table: &tables::Frames<'_>, texts: &mut Texts<'_>) -> Result<(), String> {
        let (mut flags, mut addresses, mut modules) =
            (rows(table.flags()), rows(table.addresses()), rows(table.modules()));
        let (mut functions, mut files, mut lines) =
            (rows(table.functions()), rows(table.files()), rows(table.lines()));
        for id in table.ids().into_iter().flatten() {
            let (flags, address, module) = (flags.next(), addresses.next(), modules.next());
            let (function, file) = (texts.get(functions.next())?, texts.get(files.next())?);
            let line = lines.next();
            let frame = if flags & PYTHON != 0 {
                Frame::Python { function, file, line }
            } else {
                let module = module.checked_sub(1).map(ModuleId);
                Frame::Native { address, module, function, file, line, inlined: flags & INLINED != 0 }
            };
            put(&mut self.frames, id, frame, unknown_frame)?;
        }
        Ok(())
    }

    fn read_stacks(&mut self, table: &tables::Stacks<'_>, texts: &mut Texts<'_>) -> Result<(), String> {
        if self.stacks.is_empty() {
            self.stacks.push(Stack::default());
        }
        let (mut lengths, mut flags) = (rows(table.lengths()), rows(table.flags()));
        let (mut nodes, mut forwards, mut callers) =
            (rows(table.nodes()), rows(table.forwards()), rows(table.callers()));
        let mut frames = table.frames().unwrap_or_default().iter();
        for id in table.ids().into_iter().flatten() {
            let length = lengths.next() as usize;
            if length > frames.len() {
                return Err(format!(
                    "stack {id} should have {length} frames, but only {} follow",
                    frames.len()
                ));
            }
            texts.hold(length as u64 * 4)?;
            let frames = frames.by_ref().take(length).map(FrameId).collect();
            let flags = flags.next();
            let backward = Backward {
                node: texts.get(nodes.next())?,
                forward: StackId(forwards.next()),
                caller: StackId(callers.next()),
                is_caller_inferred: flags & CALLER_INFERRED != 0,
            };
            let backward = (backward != Backward::default()).then(|| Box::new(backward));
            let stack = Stack { frames, truncated: flags & TRUNCATED != 0, backward };
            if id == 0 {
                return Err("stack 0 is defined, which means \"no stack\"".to_owned());
            }
            put(&mut self.stacks, id, stack, Stack::default)?;
        }
        Ok(())
    }
}

/// What stands where a definition was lost.
fn unknown_frame() -> Frame {
    Frame::Native {
        address: 0,
        module: None,
        function: String::new(),
        file: String::new(),
        line: 0,
        inlined: false,
    }
}

/// The texts of a block, and how much has been copied out of it and earlier ones.
struct Texts<'a> {
    texts: Vec<&'a str>,
    held: u64,
}

impl Texts<'_> {
    fn get(&mut self, number: u32) -> Result<String, String> {
        let text = *self
            .texts
            .get(number as usize)
            .or((number == 0).then_some(&""))
            .ok_or_else(|| format!("text {number} of {}", self.texts.len()))?;
        self.hold(text.len() as u64 + 24)?;
        Ok(text.to_owned())
    }

    fn hold(&mut self, bytes: u64) -> Result<(), String> {
        self.held += bytes;
        if self.held > MAX_HELD {
            return Err(format!("definitions of more than {} MiB", MAX_HELD >> 20));
        }
        Ok(())
    }
}

fn put<T>(to: &mut Vec<T>, id: u32, value: T, unknown: impl Fn() -> T) -> Result<(), String> {
    let at = id as usize;
    if at > to.len() + MAX_GAP {
        return Err(format!("id {id} where {} was expected", to.len()));
    }
    if at < to.len() {
        to[at] = value;
    } else {
        to.resize_with(at, unknown);
        to.push(value);
    }
    Ok(())
}

fn read_process(table: &tables::Process<'_>, texts: &mut Texts<'_>) -> Result<Process, String> {
    let mut words = Vec::new();
    for number in table.command().into_iter().flatten() {
        words.push(texts.get(number)?);
    }
    let mut environment = Vec::new();
    let mut pairs = table.environment().into_iter().flatten();
    while let (Some(name), Some(value)) = (pairs.next(), pairs.next()) {
        environment.push((texts.get(name)?, texts.get(value)?));
    }
    let ancestors = table.ancestors().map_or(Ok(vec![]), |table| read_ancestors(&table, texts))?;
    let mut text = |number: Option<u32>| texts.get(number.unwrap_or_default());
    Ok(Process {
        pid: table.pid().unwrap_or_default(),
        parent: table.parent().unwrap_or_default(),
        host: text(table.host())?,
        boot: text(table.boot())?,
        executable: text(table.executable())?,
        command: words,
        environment,
        rank: table.rank().and_then(|rank| rank.checked_sub(1)).and_then(|rank| u32::try_from(rank).ok()),
        start: Nanos(table.start().unwrap_or_default()),
        start_realtime: table.start_realtime().unwrap_or_default(),
        recorder: text(table.recorder())?,
        torch_version: match table.torch_version().and_then(|number| number.checked_sub(1)) {
            Some(number) => Some(text(Some(number))?),
            None => None,
        },
        began: table.began().unwrap_or_default(),
        ancestors,
        segment: table.segment().unwrap_or_default(),
        since: Nanos(table.since().unwrap_or_default()),
        after_gap: table.after_gap().unwrap_or_default() != 0,
    })
}

fn read_ancestors(table: &tables::Ancestors<'_>, texts: &mut Texts<'_>) -> Result<Vec<Ancestor>, String> {
    let (mut begans, mut lengths) = (rows(table.begans()), rows(table.lengths()));
    let mut words = table.commands().unwrap_or_default().iter();
    let mut ancestors = Vec::new();
    for pid in table.pids().into_iter().flatten() {
        let (began, length) = (begans.next(), lengths.next() as usize);
        let command = words.by_ref().take(length).map(|word| texts.get(word));
        ancestors.push(Ancestor { pid, began, command: command.collect::<Result<_, _>>()? });
    }
    Ok(ancestors)
}

/// Address spaces that wait to become a block.
#[derive(Default)]
pub(crate) struct PendingMappings {
    times: Vec<u64>,
    lengths: Vec<u32>,
    gaps: Vec<u64>,
    sizes: Vec<u64>,
}

impl PendingMappings {
    pub(crate) fn len(&self) -> usize {
        self.times.len()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.sizes.len() * 16 + self.times.len() * 12
    }

    pub(crate) fn span(&self) -> (u64, u64) {
        (
            self.times.iter().copied().min().unwrap_or_default(),
            self.times.iter().copied().max().unwrap_or_default(),
        )
    }

    pub(crate) fn push(&mut self, mappings: &Mappings) {
        self.times.push(mappings.time.0);
        self.lengths.push(mappings.mapped.len() as u32);
        let mut before = 0;
        for mapping in &mappings.mapped {
            self.gaps.push(mapping.start.wrapping_sub(before));
            self.sizes.push(mapping.end.wrapping_sub(mapping.start));
            before = mapping.end;
        }
    }

    pub(crate) fn build(&self, to: &mut FlatBufferBuilder<'_>) {
        let fields = MappingsFields {
            times: keys(to, &self.times),
            lengths: column(to, &self.lengths),
            gaps: keys(to, &self.gaps),
            sizes: column(to, &self.sizes),
        };
        let root = fields.build(to);
        to.finish_minimal(root);
    }

    pub(crate) fn clear(&mut self) {
        self.times.clear();
        self.lengths.clear();
        self.gaps.clear();
        self.sizes.clear();
    }
}

/// Address spaces of a payload that may be anything.
pub(crate) fn read_mappings(payload: &[u8]) -> Result<Vec<Mappings>, String> {
    let table = tables::Mappings::parse(payload)?;
    let mut lengths = rows(table.lengths());
    let mut gaps = table.gaps().unwrap_or_default().iter();
    let mut sizes = rows(table.sizes());
    let mut moments = Vec::new();
    for time in table.times().into_iter().flatten() {
        let length = lengths.next() as usize;
        if length > gaps.len() {
            return Err(format!("{length} mappings announced, but only {} follow", gaps.len()));
        }
        let mut before: u64 = 0;
        let mapped = gaps.by_ref().take(length).map(|gap| {
            let start = before.wrapping_add(gap);
            let end = start.wrapping_add(sizes.next());
            before = end;
            Mapping { start, end }
        });
        moments.push(Mappings { time: Nanos(time), mapped: mapped.collect() });
    }
    Ok(moments)
}

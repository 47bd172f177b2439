// check.mjs CONSUMER FILE SUMMARY FOLDER: as check.py, for consumers in JavaScript.
import {spawn, spawnSync} from 'node:child_process';
import {closeSync, existsSync, mkdtempSync, openSync, readFileSync, readdirSync, rmSync} from 'node:fs';
import {createRequire} from 'node:module';
import {tmpdir} from 'node:os';
import {pathToFileURL} from 'node:url';
import {runInThisContext} from 'node:vm';
import {gunzipSync} from 'node:zlib';

const [consumer, file, summary, folder] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${folder}/node_modules/`));
const device = JSON.parse(readFileSync(summary)).processes[0].devices[0];

function same(what, found, expected) {
  if (Number(found) !== expected) {
    console.log(`${what}: ${found} in the export, ${expected} in the summary`);
    process.exit(1);
  }
}

function skip(reason) {
  console.log(reason);
  process.exit(77);
}

// Asked of the kernel: events of Node.js come only where a script pauses.
function isAlive({pid}) {
  try {
    return !/^\d+ \(.*\) Z/.test(readFileSync(`/proc/${pid}/stat`, 'utf8'));
  } catch {
    return false;
  }
}

// What the Firefox Profiler's program knows of the first counter, asked of a server of our own. `load` would give that process half
// a second to start, however busy the machine is.
function askProfiler(program) {
  const home = mkdtempSync(`${tmpdir()}/gputrace-profiler.`);
  const options = {env: {...process.env, HOME: home}, encoding: 'utf8'};
  const log = openSync(`${home}/server.log`, 'w');
  const server = spawn(process.execPath, [program, '--daemon', file, '--session', 'gputrace'], {...options, stdio: ['ignore', log, log]});
  const patience = Date.now() + 120_000;
  const isWaiting = () => isAlive(server) && Date.now() < patience;
  const said = `${home}/.profiler-cli/gputrace.json`;
  try {
    while (!existsSync(said) && isWaiting()) pause(50);
    let told;
    do {
      pause(100);
      told = spawnSync(process.execPath, [program, 'counter', 'info', 'c-0', '--json', '--session', 'gputrace'], options);
    } while (told.status !== 0 && existsSync(said) && isWaiting());
    return {...told, log: readFileSync(`${home}/server.log`, 'utf8')};
  } finally {
    server.kill('SIGKILL');
    closeSync(log);
    rmSync(home, {recursive: true, force: true});
  }
}

function pause(milliseconds) {
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, milliseconds);
}

const consumers = {
  // Datadog's decoder of pprof.
  pprof_format() {
    let Profile;
    try {
      ({Profile} = require('pprof-format'));
    } catch {
      skip('pprof-format is not installed (tests/consumers/setup.sh)');
    }
    const profile = Profile.decode(gunzipSync(readFileSync(file)));
    const text = index => profile.stringTable.strings[Number(index)];
    const types = profile.sampleType.map(type => `${text(type.type)}/${text(type.unit)}`);
    if (types.join() !== 'inuse_objects/count,inuse_space/bytes') throw new Error(`types: ${types}`);
    same('peak', profile.sample.reduce((sum, sample) => sum + Number(sample.value[1]), 0), device.driver.peak_bytes);
    const known = new Set(profile.location.map(location => Number(location.id)));
    for (const sample of profile.sample) {
      if (!sample.locationId.every(id => known.has(Number(id)))) throw new Error('a location that is not there');
    }
    // What `go tool pprof` would demangle: `<module>` would become `<unknown>`.
    const mangled = profile.function.filter(({name, systemName}) => Number(systemName) === Number(name)).map(({name}) => text(name));
    if (mangled.length) throw new Error(`names that are taken for mangled ones: ${mangled.slice(0, 3)}`);
    const owners = {};
    for (const sample of profile.sample) {
      const label = sample.label.find(label => text(label.key) === 'owner');
      owners[text(label.str)] = (owners[text(label.str)] ?? 0) + Number(sample.value[1]);
    }
    for (const owner of device.owners) same(owner.owner, owners[owner.owner] ?? 0, owner.bytes_at_peak);
  },

  // Mozilla's own loader of the Firefox Profiler, as its program for terminals has it. It serves a profile from a process of its
  // own, with files in the home folder.
  firefox_profiler() {
    const program = `${folder}/node_modules/@firefox-devtools/profiler-cli/dist/profiler-cli.js`;
    if (!existsSync(program)) skip('@firefox-devtools/profiler-cli is not installed (tests/consumers/setup.sh)');
    const [major] = process.versions.node.split('.');
    if (Number(major) < 20) skip(`@firefox-devtools/profiler-cli needs Node.js 20, this is ${process.version}`);
    // A client that meets a server too early may take away the server's files, and nobody reaches it any more: it is asked when it has
    // said that it listens, and one that is lost is replaced.
    let told = {status: 1};
    for (let tries = 0; tries < 4 && told.status !== 0; tries += 1) told = askProfiler(program);
    if (told.status !== 0) throw new Error(`counter info: ${told.stdout}${told.stderr}; the server's words: ${told.log}`);
    const range = JSON.parse(told.stdout).stats.find(({source}) => source === 'count-range');
    same('range of the memory track', range?.value, device.driver.peak_bytes);
  },

  // speedscope's own importer, out of its bundle (1.25): all of the page's script but its last lines, which draw.
  speedscope_importer() {
    const release = `${folder}/node_modules/speedscope/dist/release`;
    if (!existsSync(release)) skip('speedscope is not installed (tests/consumers/setup.sh)');
    const bundle = readFileSync(`${release}/${readdirSync(release).find(name => /^speedscope-\w+\.js$/.test(name))}`, 'utf8');
    const importer = bundle.match(/Importing as speedscope json file"\),([\w$]+)\(/)?.[1];
    const drawing = bundle.lastIndexOf('console.log(`speedscope v');
    if (!importer || drawing < 0) throw new Error("speedscope's bundle is not as that of 1.25");
    // Whatever of a browser is touched while the script is loaded.
    const browser = () => new Proxy(function () {}, {
      get: (_, key) => (key === Symbol.toPrimitive ? () => '' : browser()),
      apply: browser,
      construct: browser,
      set: () => true,
    });
    globalThis.window = globalThis;
    for (const name of ['document', 'localStorage', 'matchMedia', 'HTMLElement', 'Image', 'location', 'addEventListener']) {
      if (!(name in globalThis)) globalThis[name] = browser();
    }
    runInThisContext(`${bundle.slice(0, drawing)}globalThis.importSpeedscope = ${importer};})();`);
    const {profiles} = globalThis.importSpeedscope(JSON.parse(readFileSync(file)));
    same('peak', profiles[0].getTotalWeight(), device.driver.peak_bytes);
    if (profiles[0].getWeightUnit() !== 'bytes') throw new Error(`unit: ${profiles[0].getWeightUnit()}`);
  },

  // The unpickler of pytorch.org/memory_viz.
  memory_viz() {
    if (!existsSync(`${folder}/MemoryViz.js`)) skip('MemoryViz.js could not be fetched (tests/consumers/setup.sh)');
    const source = readFileSync(`${folder}/MemoryViz.js`, 'utf8');
    const text = source.match(/^function unpickle\(buffer\) \{\n[\s\S]*?^\}/m)?.[0];
    if (!text) throw new Error('MemoryViz.js has no function unpickle any more');
    const unpickle = new Function(`${text}; return unpickle;`)();
    const bytes = readFileSync(file);
    const snapshot = unpickle(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
    const count = action => snapshot.device_traces[0].filter(entry => entry.action === action).length;
    same('blocks', count('alloc'), device.torch.allocations);
    same('blocks freed', count('free_requested'), device.torch.frees);
    same('errors', count('oom'), device.torch.ooms);
    const alloc = snapshot.device_traces[0].find(entry => entry.action === 'alloc');
    if (!alloc.frames.some(frame => frame.filename.endsWith('train_lm.py'))) throw new Error('no stacks');
  },
};

consumers[consumer]();

// check.mjs CONSUMER FILE SUMMARY FOLDER: as check.py, for consumers in JavaScript.
import {existsSync, readFileSync} from 'node:fs';
import {createRequire} from 'node:module';
import {pathToFileURL} from 'node:url';
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
    const owners = {};
    for (const sample of profile.sample) {
      const label = sample.label.find(label => text(label.key) === 'owner');
      owners[text(label.str)] = (owners[text(label.str)] ?? 0) + Number(sample.value[1]);
    }
    for (const owner of device.owners) same(owner.owner, owners[owner.owner] ?? 0, owner.bytes_at_peak);
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

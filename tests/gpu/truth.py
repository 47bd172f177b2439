#!/usr/bin/env python3
"""Holds `gputrace summary` against what PyTorch says of itself, on a machine with a GPU.

usage: truth.py GPUTRACE SCRIPT OUTDIR [WORKLOAD...]

SCRIPT is a program called as `SCRIPT WORKLOAD OUTDIR TAG` that writes OUTDIR/WORKLOAD.TAG.json with `stats` (a selection of
torch.cuda.memory_stats()) and, where the allocator has a history, `seq`, a hash of its requests. Each workload runs under no
options, expandable segments and cudaMallocAsync, alone and recorded: both must say the same, and so must the trace.
Exit status 0 only if everything is equal.
"""
import json, os, subprocess, sys

OPTIONS = {"default": "", "expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}
FIELDS = {  # summary's field: PyTorch's
    "peak_reserved_bytes": "reserved_bytes.all.peak",
    "peak_allocated_bytes": "allocated_bytes.all.peak",
    "peak_requested_bytes": "requested_bytes.all.peak",
    "allocations": "allocation.all.allocated",
    "device_allocs": "num_device_alloc",
    "device_frees": "num_device_free",
    "ooms": "num_ooms",
}
# What PyTorch fills in for this backend.
ASYNC = ("peak_reserved_bytes", "peak_allocated_bytes")


def main():
    gputrace, script, out = sys.argv[1:4]
    workloads = sys.argv[4:] or ["gpt_grow", "resnet_multires", "streams"]
    wrong = 0
    for workload in workloads:
        for tag, options in OPTIONS.items():
            environment = dict(os.environ, PYTORCH_CUDA_ALLOC_CONF=options)
            if not options:
                del environment["PYTORCH_CUDA_ALLOC_CONF"]
            results = []
            for mode in ("alone", "recorded"):
                folder = f"{out}/{mode}"
                os.makedirs(folder, exist_ok=True)
                command = [sys.executable, script, workload, folder, tag]
                trace = f"{out}/{workload}.{tag}.gtr"
                if mode == "recorded":
                    command = [gputrace, "record", "-f", "-o", trace, "--"] + command
                run = subprocess.run(command, env=environment, capture_output=True, text=True)
                if run.returncode:
                    print(f"{workload}.{tag} {mode}: exit {run.returncode}: {run.stderr[-500:]}")
                results.append(json.load(open(f"{folder}/{workload}.{tag}.json")))
            alone, recorded = results
            for result in results:  # the driver's pool grows as its threads please: no two runs are alike
                if tag == "async":
                    result["compared"] = {k: v for k, v in result["stats"].items() if not k.startswith("reserved")}
                else:
                    result["compared"] = result["stats"]
            same = alone["compared"] == recorded["compared"] and alone.get("seq") == recorded.get("seq")
            summary = json.loads(subprocess.run([gputrace, "summary", "--json", trace], capture_output=True, text=True).stdout)
            process = summary["processes"][0]
            torch = process["devices"][0]["torch"] or {}
            fields = ASYNC if tag == "async" else FIELDS
            differ = [f"{field} {torch.get(field)} PyTorch {recorded['stats'][FIELDS[field]]}"
                      for field in fields if torch.get(field) != recorded["stats"][FIELDS[field]]]
            lost = process["lost_events"]
            wrong += (not same) + bool(differ) + bool(lost)
            size = os.path.getsize(trace) / max(process["events"], 1)
            print(f"{workload + '.' + tag:28} program {'unchanged' if same else 'CHANGED'}  "
                  f"{len(fields) - len(differ)} of {len(fields)} equal  {process['events']} events, {lost} lost, {size:.1f} B/event"
                  + "".join("\n    " + text for text in differ), flush=True)
    sys.exit(1 if wrong else 0)


main()

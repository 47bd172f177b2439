#!/usr/bin/env python3
"""Holds `gputrace predict` against the truth: programs of many kinds, recorded small, and run four to sixteen times as large.

usage: predict.py FOLDER [NAME...]
       predict.py FOLDER --again RESULTS...  what is predicted now from the traces that earlier runs kept; needs no GPU
       predict.py FOLDER --fits RESULTS      the same traces, and only the largest batches are run; about two minutes

FOLDER has `gputrace` and `libgputrace.so`; NAMEs are of CASES, `third` to `thirteenth` are sets of them, all if there are none. Of each: small runs are recorded, what
larger ones reserve is predicted, and the larger ones are run alone, several programs at a time. `--fit batch` is asked for a limit
that then holds: what it says is right where that value runs, and the next does not; then once more with the program as a command, with which
`predict` proves it. Results are written to $OUT (or a new folder) as
they come: predict.jsonl, the traces of the small runs (traces.N.tar), and table.txt. PASS and FAIL lines; about ten minutes on a GPU
of 80 GB or more with 16 cores; PREDICT_SECONDS (480) is when nothing more is started, PREDICT_SLOTS how many run at a time, and with
PREDICT_KEEP the larger runs are recorded as well and kept.
"""
import glob, json, os, subprocess, sys, tarfile, tempfile, threading, time

FOLDER = os.path.abspath(sys.argv[1])
GPUTRACE = os.path.join(FOLDER, "gputrace")
EARLIER = sys.argv[3:] if sys.argv[2:3] in (["--again"], ["--fits"]) else None
# The larger runs are recorded, too: what they asked for can be held against what was predicted.
KEEPS = bool(os.environ.get("PREDICT_KEEP"))
OUT = os.environ.get("OUT") or tempfile.mkdtemp(prefix="predict-")
WORK = tempfile.mkdtemp(prefix="predict-work-")
PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "predict_programs.py")
END = time.time() + float(os.environ.get("PREDICT_SECONDS", 480))
SLOTS = int(os.environ.get("PREDICT_SLOTS", max(2, min(12, (os.cpu_count() or 4) // 2 + 2))))
ONE_RUN = 200
# Of all runs with which `predict` proves one answer, one after the other.
PROOF = 300
GIB = 1 << 30
# What contexts and code take of a card beside what PyTorch reserves.
CONTEXT = 2 * GIB
MOST_LIMIT = 12 * GIB
MOST_TRIES = 6

# Name of the program, `-` and what is other about the case: recorded, targets, and whether the largest batch is looked for.
CASES = {
    "gpt_compile": ("batch=4 batch=8", "batch=32 batch=48 batch=96", False),
    "ddp": ("batch=4 batch=8", "batch=32 batch=64 batch=100", False),
    "gpt": ("batch=4 batch=8", "batch=32 batch=48 batch=100", True),
    "gpt_seq": ("batch=4,seq=256 batch=8,seq=256 batch=4,seq=512", "batch=16,seq=1024 batch=32,seq=512 batch=12,seq=2048", True),
    "gpt_matrix": ("batch=2,seq=256 batch=4,seq=256 batch=2,seq=512", "batch=8,seq=1024 batch=16,seq=512 batch=4,seq=2048", True),
    "gpt_checkpoint": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "gpt_fp32": ("batch=4 batch=8", "batch=32 batch=64 batch=100", True),
    "gpt_accumulate": ("batch=4 batch=8", "batch=32 batch=48 batch=100", True),
    "llama": ("batch=2 batch=4", "batch=16 batch=32 batch=60", True),
    "lora": ("batch=2 batch=4", "batch=16 batch=32 batch=60", True),
    "vit": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "resnet": ("batch=16 batch=32", "batch=128 batch=200 batch=256", True),
    "resnet_benchmark": ("batch=16 batch=32", "batch=128 batch=200 batch=256", False),
    "unet": ("batch=4,side=64 batch=8,side=64 batch=4,side=128", "batch=32,side=128 batch=16,side=256 batch=48,side=192", True),
    "diffusion": ("batch=4 batch=8", "batch=32 batch=64 batch=100", True),
    "gnn": ("nodes=10000 nodes=20000", "nodes=80000 nodes=160000 nodes=250000", False),
    "moe": ("batch=16 batch=32", "batch=128 batch=256 batch=400", False),
    "lstm": ("batch=8,seq=128 batch=16,seq=128 batch=8,seq=256", "batch=64,seq=256 batch=32,seq=1024 batch=100,seq=512", True),
    "rnn_loop": ("batch=16,seq=32 batch=32,seq=32 batch=16,seq=64", "batch=256,seq=64 batch=64,seq=256 batch=128,seq=200", False),
    "generate_static": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "generate_growing": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "evaluate": ("batch=8 batch=16", "batch=64 batch=128 batch=200", True),
    "bert": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "translate": ("batch=8 batch=16", "batch=64 batch=128 batch=200", False),
    "mixer": ("batch=16 batch=32", "batch=128 batch=256 batch=500", False),
    "video": ("batch=2 batch=4", "batch=16 batch=32 batch=60", False),
    "audio": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "gan": ("batch=16 batch=32", "batch=128 batch=256 batch=500", False),
    "recommend": ("batch=2048 batch=4096", "batch=16384 batch=32768 batch=60000", False),
    "chunked": ("batch=4 batch=8", "batch=32 batch=64 batch=100", False),
    "microbatches": ("batch=4 batch=8", "batch=32 batch=64 batch=100", False),
    "resnet_last": ("batch=16 batch=32", "batch=128 batch=200 batch=256", True),
    "gpt_length": ("seq=128 seq=256", "seq=1024 seq=2048 seq=4096", False),
    "adafactor": ("batch=4 batch=8", "batch=32 batch=48 batch=100", True),
    "physics": ("points=4000 points=8000", "points=32000 points=64000 points=120000", False),
    "padded": ("batch=8 batch=16", "batch=64 batch=128 batch=200", False),
    "gpt-other": ("batch=3 batch=5", "batch=20 batch=41 batch=77", True),
    "gpt_matrix-other": ("batch=3,seq=192 batch=6,seq=192 batch=3,seq=320", "batch=24,seq=768 batch=50,seq=400 batch=6,seq=1900", False),
    "vit-other": ("batch=6 batch=10", "batch=40 batch=90 batch=160", True),
    "lstm-other": ("batch=6,seq=100 batch=12,seq=100 batch=6,seq=150", "batch=60,seq=200 batch=24,seq=900 batch=90,seq=450", True),
    "resnet-other": ("batch=12 batch=20 batch=40", "batch=160 batch=240 batch=320", True),
    "unet-other": ("batch=3,side=96 batch=6,side=96 batch=3,side=160", "batch=24,side=160 batch=12,side=320 batch=40,side=224", True),
    "contrast": ("batch=512 batch=1024", "batch=4096 batch=8192 batch=16000", False),
}
# Programs that were written before anything was measured of them, and predicted once.
THIRD = {
    "vit_compile": ("batch=8 batch=16", "batch=64 batch=128 batch=250", False),
    "speech": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "detect": ("batch=4 batch=8", "batch=32 batch=64 batch=120", False),
    "codebook": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "tuned": ("batch=2 batch=4", "batch=16 batch=32 batch=60", True),
    "towers": ("batch=32 batch=64", "batch=256 batch=512 batch=1000", True),
    "scan": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "clips": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "graphs": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "attend": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "sparse": ("batch=2048 batch=4096", "batch=16384 batch=32768 batch=60000", False),
    "rollout": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "distil": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "mobile": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "fused": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "one_by_one": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "beams": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "dense": ("batch=2,side=32 batch=4,side=32 batch=2,side=48", "batch=16,side=64 batch=8,side=128 batch=32,side=96", False),
    "packed": ("batch=16 batch=32", "batch=128 batch=256 batch=500", False),
}
FOURTH = {
    "windows": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "vae": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "rays": ("batch=512 batch=1024", "batch=4096 batch=8192 batch=15000", True),
    "policy": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "triplets": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "points": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "masked": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "muon": ("batch=4 batch=8", "batch=32 batch=64 batch=100", True),
    "averaged": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "at_once": ("batch=4 batch=8", "batch=32 batch=48 batch=100", True),
    "serve": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "segment": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "wave": ("batch=2 batch=4", "batch=16 batch=32 batch=60", True),
    "gru": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "meta": ("batch=32 batch=64", "batch=256 batch=512 batch=1000", True),
    "prefer": ("batch=2 batch=4", "batch=16 batch=32 batch=60", True),
    "fourier": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
}
FIFTH = {
    "compiled_layers": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "biased": ("batch=4,seq=192 batch=8,seq=192 batch=4,seq=320", "batch=32,seq=320 batch=16,seq=1280 batch=64,seq=512", True),
    "every_second": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "adapters": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "patches": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "medical": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "bottlenecks": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "groups_benchmark": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "denoise": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "attention_graph": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "capacity": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "spell": ("batch=16,seq=32 batch=32,seq=32 batch=16,seq=48", "batch=128,seq=48 batch=64,seq=192 batch=256,seq=96", True),
    "answers_static": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "answers_growing": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "sharpen": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "pairs": ("batch=128 batch=256", "batch=1024 batch=2048 batch=4000", True),
}
SIXTH = {
    "compiled_odd": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "odd_patches": ("batch=12 batch=24", "batch=96 batch=200 batch=380", True),
    "classify": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "recomputed": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "plain_convolutions": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "latents": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "means": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "tags": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "captions": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "low_rank": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
}
SEVENTH = {
    "compiled_image": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "encoder": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "lengths": ("batch=2,seq=256 batch=4,seq=256 batch=2,seq=384", "batch=16,seq=384 batch=8,seq=1536 batch=32,seq=768", True),
    "segments": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "rank_sixteen": ("batch=2 batch=4", "batch=16 batch=32 batch=60", True),
    "small_images": ("batch=10 batch=20", "batch=80 batch=160 batch=300", True),
    "organs": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "clean": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "basic": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "basic_benchmark": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "molecules": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "experts": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "series": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "write_static": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "write_growing": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "rows": ("batch=256 batch=512", "batch=2048 batch=4096 batch=8000", True),
    "sounds": ("batch=4,seq=400 batch=8,seq=400 batch=4,seq=600", "batch=32,seq=600 batch=16,seq=2000 batch=64,seq=800", True),
    "critic": ("batch=1000 batch=2000", "batch=8000 batch=16000 batch=30000", True),
}
EIGHTH = {
    "compiled_story": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "story": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "story_again": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "projections": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "leaves": ("batch=10 batch=20", "batch=80 batch=160 batch=300", True),
    "roads": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "birds": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "birds_benchmark": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "faces": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "citations": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "seats": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "songs": ("batch=8,seq=96 batch=16,seq=96 batch=8,seq=160", "batch=64,seq=160 batch=32,seq=640 batch=128,seq=320", True),
    "say_static": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "say_growing": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
}
NINTH = {
    "flowers": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "flowers_half": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "cells": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "phones": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "sketches": ("batch=32 batch=64", "batch=256 batch=512 batch=1000", True),
    "essays": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "essays_again": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "factors": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "prices": ("batch=2000 batch=4000", "batch=16000 batch=32000 batch=60000", True),
    "verses": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
}
TENTH = {
    "forms": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "letters": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "letters_again": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "lessons": ("batch=2 batch=4", "batch=16 batch=32 batch=60", True),
    "stamps": ("batch=10 batch=20", "batch=80 batch=160 batch=300", True),
    "rivers": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "dunes": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "bees": ("batch=12 batch=24", "batch=96 batch=200 batch=320", True),
    "wasps": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "traffic": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "desks": ("batch=6 batch=12", "batch=48 batch=96 batch=180", True),
    "gestures": ("batch=32 batch=64", "batch=256 batch=512 batch=1000", True),
    "reply_static": ("batch=8 batch=16", "batch=80 batch=160 batch=250", True),
    "reply_growing": ("batch=8 batch=16", "batch=96 batch=160 batch=250", True),
}
ELEVENTH = {
    "diary": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "chronicle": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "ballads": ("batch=6 batch=12", "batch=48 batch=96 batch=180", True),
    "judges": ("batch=2 batch=4", "batch=16 batch=32 batch=60", True),
    "plates": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "fields": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "posters": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "passports": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "fruits": ("batch=16 batch=32", "batch=128 batch=256 batch=500", True),
    "friends": ("batch=4 batch=8", "batch=32 batch=64 batch=120", True),
    "genomes": ("batch=8 batch=16", "batch=64 batch=128 batch=250", True),
    "meters": ("batch=24 batch=48", "batch=192 batch=384 batch=720", True),
    "chat_static": ("batch=8 batch=16", "batch=80 batch=160 batch=250", True),
    "chat_growing": ("batch=8 batch=16", "batch=96 batch=160 batch=250", True),
}
TWELFTH = {
    "lyrics": ("batch=6 batch=10", "batch=40 batch=80 batch=140", True),
    "novels": ("batch=4 batch=8", "batch=32 batch=48 batch=64", True),
    "recipes": ("batch=3 batch=5", "batch=20 batch=30 batch=42", True),
    "tutors": ("batch=2 batch=4", "batch=16 batch=28 batch=40", True),
    "shells": ("batch=12 batch=20", "batch=80 batch=160 batch=300", True),
    "glaciers": ("batch=12 batch=20", "batch=80 batch=160 batch=220", True),
    "clouds": ("batch=12 batch=20", "batch=80 batch=128 batch=200", True),
    "coins": ("batch=20 batch=32", "batch=128 batch=200 batch=360", True),
    "orchids": ("batch=32 batch=64", "batch=256 batch=512 batch=1000", True),
    "enzymes": ("batch=96 batch=160", "batch=640 batch=1280 batch=2500", True),
    "markets": ("batch=6 batch=10", "batch=40 batch=64 batch=90", True),
    "tides": ("batch=32 batch=64", "batch=256 batch=400 batch=600", True),
    "advise_static": ("batch=16 batch=32", "batch=160 batch=320 batch=500", True),
    "advise_growing": ("batch=16 batch=24", "batch=96 batch=192 batch=384", True),
}
THIRTEENTH = {
    "poems": ("batch=8 batch=12", "batch=48 batch=96 batch=140", True),
    "minutes": ("batch=4 batch=6", "batch=24 batch=32 batch=48", True),
    "sagas": ("batch=3 batch=5", "batch=20 batch=30 batch=42", True),
    "clerks": ("batch=2 batch=4", "batch=16 batch=24 batch=36", True),
    "mosaics": ("batch=24 batch=40", "batch=160 batch=320 batch=480", True),
    "roofs": ("batch=16 batch=24", "batch=96 batch=192 batch=300", True),
    "murals": ("batch=8 batch=12", "batch=48 batch=96 batch=150", True),
    "tiles": ("batch=32 batch=48", "batch=192 batch=384 batch=700", True),
    "mushrooms": ("batch=8 batch=16", "batch=64 batch=128 batch=200", True),
    "transit": ("batch=512 batch=1024", "batch=4096 batch=8192 batch=16000", True),
    "guilds": ("batch=6 batch=12", "batch=48 batch=72 batch=100", True),
    "voices": ("batch=16 batch=32", "batch=128 batch=256 batch=450", True),
    "draft_static": ("batch=10 batch=16", "batch=64 batch=160 batch=250", True),
    "draft_growing": ("batch=8 batch=16", "batch=64 batch=128 batch=200", True),
}
SETS = {"third": THIRD, "fourth": FOURTH, "fifth": FIFTH, "sixth": SIXTH, "seventh": SEVENTH, "eighth": EIGHTH, "ninth": NINTH, "tenth": TENTH, "eleventh": ELEVENTH,
        "twelfth": TWELFTH, "thirteenth": THIRTEENTH}
CASES |= THIRD | FOURTH | FIFTH | SIXTH | SEVENTH | EIGHTH | NINTH | TENTH | ELEVENTH | TWELFTH | THIRTEENTH

failed, lines, rows = 0, threading.Lock(), []


def write(row):
    with lines:
        rows.append(row)
        with open(f"{OUT}/predict.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")


class Machine:
    """So many processes at a time, and no more memory than there is."""

    def __init__(self):
        total = int(subprocess.run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
                                   capture_output=True, text=True, check=True).stdout.split()[0]) << 20
        self.all = self.memory = int(total * 0.9)
        self.slots, self.turn = SLOTS, threading.Condition()

    def run(self, bytes_needed, command, environment=None, timeout=ONE_RUN):
        """Output of a command, or None where it is too late or it takes too long."""
        needed = min(bytes_needed + CONTEXT, self.all)
        with self.turn:
            while self.slots == 0 or self.memory < needed:
                if time.time() > END:
                    return None
                self.turn.wait(1)
            self.slots, self.memory = self.slots - 1, self.memory - needed
        try:
            if time.time() > END:
                return None
            environment = dict(os.environ, OMP_NUM_THREADS="2", TORCHINDUCTOR_COMPILE_THREADS="2", **(environment or {}))
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with self.turn:
                self.slots, self.memory = self.slots + 1, self.memory + needed
                self.turn.notify_all()


class TooLate(Exception):
    pass


def program(name, values):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [sys.executable, *(launcher if name == "ddp" else []), PROGRAM, name.split("-")[0], values]


def truth(machine, name, values, needed, limit=None, record=None):
    """What the program says of itself at these values."""
    if KEEPS and record is None:
        record = f"{WORK}/large.{name}.{values.replace('=', '').replace(',', '.')}{'.limit' if limit else ''}"
    command = program(name, values) + ([str(limit)] if limit else [])
    if record:
        rank = "r%l." if name == "ddp" else ""
        command = [GPUTRACE, "record", "-q", "-f", "--stacks", "python", "-o", f"{record}.{rank}gtr", "--"] + command
    # Compiled code of another run would spare this one what compiling takes.
    cache = tempfile.mkdtemp(dir=WORK)
    result = machine.run(needed, command, {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache + "/triton"})
    if result is None:
        raise TooLate(f"{values}: not run, or not within {ONE_RUN} s")
    said = [line for line in result.stdout.splitlines() if line.startswith("TRUTH ")]
    if not said:
        raise RuntimeError(f"{values}: exit {result.returncode}: {result.stderr[-600:]}")
    return json.loads(said[0][6:])


def ask(runs, *arguments):
    command = [GPUTRACE, "predict", "--json", *arguments, *(f"{values}:{trace}" for values, trace in runs)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=ONE_RUN)
    if result.returncode:
        raise RuntimeError(f"predict: exit {result.returncode}: {result.stderr[-400:]}")
    return json.loads(result.stdout)


def what_was_said(guess):
    return {"predicted": guess["peak_reserved_bytes"], "allocated": guess["peak_allocated_bytes"],
            "range": guess["peak_reserved_range"], "replays": guess.get("peak_reserved_replays"), "sure": guess["sure"],
            "open": [it["text"] for it in guess["open"]], "reasons": guess["reasons"]}


def largest(runs, limit, others):
    """The largest batch in a limit that holds for what PyTorch reserves alone."""
    arguments = ["--fit", "batch", "--limit", str(limit), "--other", "0", "--policy", "torch"]
    return ask(runs, *arguments, *(["--at", others] if others else []))["fits"][0]


def point(values):
    return {key: int(value) for key, value in (pair.split("=") for pair in values.split(","))}


def case(machine, name):
    small, targets, is_fit = CASES[name]
    small, targets = small.split(), targets.split()
    traces = {}

    def record(values):
        base = f"{WORK}/{name}.{values.replace('=', '').replace(',', '.')}"
        said = truth(machine, name, values, 4 * GIB, record=base)
        write({"kind": "small", "name": name, "trace": os.path.basename(base), **said})
        found = sorted(glob.glob(f"{base}.*gtr"))
        traces[values] = next((it for it in found if ".r0." in it), found[0])

    together([lambda values=values: record(values) for values in small])
    runs = [(values, traces[values]) for values in small]
    outcomes = ask(runs, *(word for target in targets for word in ("--at", target)))["outcomes"]
    predicted = {target: next(it for it in outcomes if it["values"] == point(target)) for target in targets}

    def hold(target):
        guess = predicted[target]
        said = truth(machine, name, target, max(guess["peak_reserved_bytes"], guess["peak_reserved_range"][1] // 2))
        if said["ran_out"] or said["retries"]:
            said = truth(machine, name, target, 1 << 50)  # with nobody beside it
        write({"kind": "target", "name": name, "at": target, "truth": said, **what_was_said(guess)})

    def fit():
        limit = min(MOST_LIMIT, int(predicted[targets[1]]["peak_reserved_bytes"] * 1.05)) >> 20 << 20
        others = ",".join(f"{key}={value}" for key, value in point(small[0]).items() if key != "batch")
        search(machine, name, runs, limit, others)
        prove(machine, name, runs, limit, others)

    tasks = [lambda target=target: hold(target) for target in targets]
    together(tasks + ([fit] if is_fit else []))


def search(machine, name, runs, limit, others):
    """The largest batch that runs: between what is predicted and its neighbour, or from there on."""
    found = largest(runs, limit, others)
    first, tried = found["largest"] or 0, {}

    def fits(batch):
        values = ",".join(filter(None, [f"batch={batch}", others]))
        tried[batch] = batch == 0 or not truth(machine, name, values, limit, limit=limit)["ran_out"]

    def edges():
        return max([it for it in tried if tried[it]], default=None), min([it for it in tried if not tried[it]], default=None)

    together([lambda: fits(first), lambda: fits(first + 1)])
    good, bad = edges()
    step = 1
    while len(tried) < 2 + MOST_TRIES and (good is None or bad is None or bad - good > 1):
        step *= 2
        fits((good + bad) // 2 if good is not None and bad is not None else good + step if bad is None else max(bad - step, 0))
        good, bad = edges()
    write({"kind": "fit", "name": name, "limit": limit, "largest": first, "range": found["largest_range"], "certain": found["certain"],
           "truth": good, "fails": bad, "tried": {str(key): value for key, value in sorted(tried.items())}, "with": others})


def prove(machine, name, runs, limit, others):
    """What `predict` finds by running the program itself."""
    command = [GPUTRACE, "predict", "--json", "--fit", "batch", "--limit", str(limit), "--other", "0", *(["--at", others] if others else []),
               "--traces", f"{WORK}/prove.{name}", *(f"{values}:{trace}" for values, trace in runs), "--",
               *program(name, ",".join(filter(None, ["batch={batch}", others]))), str(limit)]
    began = time.time()
    result = machine.run(limit, command, timeout=PROOF)
    if result is None:
        raise TooLate("not proved in time")
    if result.returncode:
        raise RuntimeError(f"predict with a command: exit {result.returncode}: {result.stderr[-400:]}")
    found = json.loads(result.stdout)["fits"][0]
    write({"kind": "proved", "name": name, "limit": limit, "largest": found["largest"], "checked": found["checked"], "ran": found["ran"],
           "seconds": round(time.time() - began)})


def together(tasks):
    """Runs all; the first error, once all have ended."""
    errors = []

    def one(task):
        try:
            task()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(task,), daemon=True) for task in tasks]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    if errors:
        raise errors[0]


def pack():
    """The small runs' traces, so that predictions can be made again without a GPU."""
    size, number, tar = 0, 0, None
    for path in sorted(glob.glob(f"{WORK}/*.gtr"), key=lambda path: ("/large." in path, path)):
        bytes_of = os.path.getsize(path)
        if tar is None or size + bytes_of > 15 << 20:
            if tar: tar.close()
            number, size, tar = number + 1, 0, tarfile.open(f"{OUT}/traces.{number + 1}.tar", "w")
        size += bytes_of
        tar.add(path, os.path.basename(path))
    if tar: tar.close()


def again(results, machine=None):
    """The recorded truth beside what is predicted now; with a machine, the largest batches are looked for again."""
    known = []
    for folder in results:
        for path in glob.glob(f"{folder}/traces.*.tar"):
            with tarfile.open(path) as tar:
                tar.extractall(WORK)
        with open(f"{folder}/predict.jsonl") as file:
            known += [json.loads(line) for line in file]
    tasks = []
    for name in CASES:
        ending = ".r0.gtr" if name == "ddp" else ".gtr"
        small = [(values, f"{WORK}/{name}.{values.replace('=', '').replace(',', '.')}{ending}") for values in CASES[name][0].split()]
        mine = [row for row in known if row["name"] == name and all(os.path.exists(trace) for _, trace in small)]
        for row in mine:
            if row["kind"] == "target" and machine is None:
                write({**row, **what_was_said(ask(small, "--at", row["at"])["outcomes"][0])})
            elif row["kind"] == "fit" and machine is None:
                found = largest(small, row["limit"], row["with"])
                write({**row, "largest": found["largest"] or 0, "range": found["largest_range"], "certain": found["certain"]})
            elif row["kind"] == "fit":
                tasks.append(lambda row=row, small=small: search(machine, row["name"], small, row["limit"], row["with"]))
    together(tasks)


def left_out(targets):
    """How wide ranges must be beyond their replays, chosen from all programs but one and held against that one, for each."""
    ranges = [row for row in targets if row["sure"] != "certain" and row.get("replays")]
    need = {}
    for row in ranges:
        truth, (low, high) = row["truth"]["reserved"], row["replays"]
        need[row["name"]] = max(need.get(row["name"], 1.0), low / truth, truth / high)
    if len(need) < 2:
        return []
    held = lambda row: max(row["truth"]["reserved"] / row["replays"][1], row["replays"][0] / row["truth"]["reserved"]) <= max(
        other for name, other in need.items() if name != row["name"])
    n_sure = [row for row in targets if row["sure"] == "certain"]
    inside = sum(row["inside"] for row in n_sure) + sum(map(held, ranges))
    widths = sorted(row["range"][1] / row["range"][0] for row in ranges)
    most = sorted(need.items(), key=lambda it: -it[1])[:5]
    return [f"ranges: the median is {widths[len(widths) // 2]:.2f} times as high as low, the widest {widths[-1]:.2f}; beyond their replays truth lies by at most "
            + ", ".join(f"{(factor - 1) * 100:.1f} % ({name})" for name, factor in most),
            f"one program left out at a time: {inside} of {len(targets)} inside, with what the others need"]


def table():
    targets = [row for row in rows if row["kind"] == "target"]
    order = list(CASES)
    text = []
    for row in sorted(targets, key=lambda row: order.index(row["name"])):
        reserved, (low, high) = row["truth"]["reserved"], row["range"]
        row["error"] = row["predicted"] / reserved - 1
        row["inside"] = low <= reserved <= high
        text.append(f"{row['name']:18} {row['at']:22} truth {reserved / GIB:7.3f} GiB  predicted {row['predicted'] / GIB:7.3f}  "
                    f"{row['error'] * 100:+7.2f} %  {row['sure']:8} {low / GIB:7.3f} to {high / GIB:7.3f}  "
                    f"{'inside' if row['inside'] else 'OUTSIDE'}  allocated {(row['allocated'] / row['truth']['allocated'] - 1) * 100:+.2f} %")
    fits = [row for row in rows if row["kind"] == "fit"]
    for row in fits:
        text.append(f"{row['name']:18} fits in {row['limit'] / GIB:6.3f} GiB: {row['largest']}, truth {row['truth']} ({row.get('fails')} does not), range {row['range']}, "
                    f"{'certain' if row['certain'] else 'range'}")
    proved = [row for row in rows if row["kind"] == "proved"]
    truth_of = {row["name"]: row["truth"] for row in fits}
    for row in proved:
        others = "" if truth_of.get(row["name"]) == row["largest"] else f", bisected {truth_of.get(row['name'])}"
        text.append(f"{row['name']:18} by running: {row['largest']}{'' if row['checked'] else ' or more'}{others}, tried "
                    + ", ".join(f"{it['value']}{'' if it['fits'] else ' (not)'}" for it in row["ran"]) + f", {row['seconds']} s")
    for row in rows:
        if row["kind"] == "failed":
            text.append(f"{row['name']:18} failed: {row['error']}")
    certain = [row for row in targets if row["sure"] == "certain"]
    near = sum(abs(row["error"]) <= 0.01 for row in certain)
    inside = sum(row["inside"] for row in targets)
    exact = sum(row["largest"] == row["truth"] for row in fits)
    marks = [
        (near >= 0.8 * len(certain), f"within 1 % of those called certain: {near} of {len(certain)}") if targets else None,
        (inside >= 0.95 * len(targets), f"inside the range: {inside} of {len(targets)}") if targets else None,
        (exact >= 0.8 * len(fits), f"the exact batch: {exact} of {len(fits)}") if fits else None,
        (all(row["checked"] for row in proved), f"the exact batch, by running: {sum(row['checked'] for row in proved)} of {len(proved)}") if proved else None,
    ]
    marks = [mark for mark in marks if mark]
    text += left_out(targets)
    text += [f"{'PASS' if good else 'FAIL'}  {what}" for good, what in marks]
    with open(f"{OUT}/table.txt", "w") as file:
        file.write("\n".join(text) + "\n")
    print("\n".join(text), flush=True)
    return all(good for good, _ in marks)


def main():
    if EARLIER:
        again(EARLIER, Machine() if sys.argv[2] == "--fits" else None)
        sys.exit(0 if table() else 1)
    began, machine = time.time(), Machine()
    n_gpus = len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())
    names = [name for word in sys.argv[2:] for name in SETS.get(word, [word])]
    names = names or [name for name in CASES if name != "ddp" or n_gpus > 1]

    def one(name):
        try:
            case(machine, name)
            print(f"{time.time() - began:5.0f} s  {name} done", flush=True)
        except Exception as error:
            write({"kind": "failed", "name": name, "error": f"{type(error).__name__}: {error}"})
            print(f"{time.time() - began:5.0f} s  {name} failed: {str(error)[-300:]}", flush=True)

    threads = [threading.Thread(target=one, args=(name,), daemon=True) for name in names]
    for thread in threads: thread.start()
    for thread in threads:
        thread.join(max(1.0, END + 30 - time.time()))
    pack()
    good = table()
    print(f"{time.time() - began:.0f} s, results in {OUT}", flush=True)
    sys.stdout.flush()
    os._exit(0 if good else 1)


main()

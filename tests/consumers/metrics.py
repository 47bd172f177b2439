"""metrics.py EXPOSITION TOP: the reference parser of OpenMetrics reads what `gputrace metrics` says, and the sums are those of `gputrace top
--json` of the same trace. Exit status 77 where the parser is not installed (tests/consumers/setup.sh)."""
import json, sys

try:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families
except ImportError:
    print("no prometheus_client (tests/consumers/setup.sh)")
    sys.exit(77)

with open(sys.argv[1]) as exposition, open(sys.argv[2]) as top:
    families = {family.name: family for family in text_string_to_metric_families(exposition.read())}
    top = json.load(top)
devices = [device for process in top["processes"] for device in process["devices"]]
torches = [device["torch"] for device in devices if device["torch"]]
wrong = []


def same(what, found, expected):
    if found != expected:
        wrong.append(f"{what}: {found} instead of {expected}")


def total(name):
    return sum(sample.value for sample in families[name].samples) if name in families else None


same("processes", len(families["gputrace_process_info"].samples), len(top["processes"]))
same("held", total("gputrace_held_bytes"), sum(device["driver_bytes"] for device in devices))
same("owners", total("gputrace_owner_bytes"), sum(device["driver_bytes"] for device in devices))
same("allocations", total("gputrace_driver_allocations"), sum(device["allocations"] for device in devices))
for name in ["allocated", "reserved", "requested", "stranded"]:
    same(name, total(f"gputrace_torch_{name}_bytes"), sum(torch[f"{name}_bytes"] for torch in torches) if torches else None)
for family in families.values():
    if family.name.endswith("_bytes"):
        same(f"unit of {family.name}", family.unit, "bytes")
counters = [family.name for family in families.values() if family.type == "counter"]
same("counters that do not count", [name for name in counters if total(name) < 0], [])
cards = [card for card in top["cards"] if card["used_bytes"] is not None]
same("hw.gpu", total("hw_gpu_memory_usage_bytes"), sum(card["used_bytes"] for card in cards) if cards else None)
for name, field in [("USED", "used_bytes"), ("FREE", "free_bytes"), ("TOTAL", "total_bytes")]:
    same(f"DCGM's {name}", total(f"DCGM_FI_DEV_FB_{name}"), sum(card[field] >> 20 for card in cards) if cards else None)
for sample in families["DCGM_FI_DEV_FB_USED"].samples if cards else []:
    same("DCGM's labels", sorted(sample.labels), ["Hostname", "UUID", "device", "gpu", "modelName"])
print("\n".join(wrong))
sys.exit(1 if wrong else 0)

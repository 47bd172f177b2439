"""otlp.py BODY SUMMARY: OpenTelemetry's own messages read what `gputrace metrics --push otlp` sent, and the sums are those of `gputrace summary
--json` of the same trace. Exit status 77 where they are not installed (tests/consumers/setup.sh)."""
import json, sys

try:
    from google.protobuf.json_format import Parse
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
except ImportError:
    print("no opentelemetry-proto (tests/consumers/setup.sh)")
    sys.exit(77)

with open(sys.argv[1]) as body, open(sys.argv[2]) as summary:
    # A field that the messages do not know is an error.
    sent = Parse(body.read(), ExportMetricsServiceRequest())
    summary = json.load(summary)
devices = [device for process in summary["processes"] for device in process["devices"]]
torches = [device["torch"] for device in devices if device["torch"]]
metrics = {metric.name: metric for resource in sent.resource_metrics for scope in resource.scope_metrics for metric in scope.metrics}
wrong = []


def total(name):
    metric = metrics[name]
    points = getattr(metric, metric.WhichOneof("data")).data_points
    if not all(point.WhichOneof("value") and point.time_unix_nano for point in points):
        wrong.append(f"{name}: a point without a value or a time")
    return sum(getattr(point, point.WhichOneof("value")) for point in points)


def same(what, found, expected):
    if found != expected:
        wrong.append(f"{what}: {found} instead of {expected}")


same("held", total("gputrace.held"), sum(device["driver"]["live_bytes"] for device in devices))
same("owners", total("gputrace.owner"), sum(owner["live_bytes"] for device in devices for owner in device["owners"]))
same("handed out", total("gputrace.driver.allocations"), sum(device["driver"]["allocs"] for device in devices))
same("blocks", total("gputrace.torch.allocations"), sum(torch["allocations"] for torch in torches))
for name in ["gputrace.torch.allocations", "gputrace.driver.allocations"]:
    counter = metrics[name].sum
    same(f"{name} only rises, and is counted from the start", (counter.is_monotonic, counter.aggregation_temporality), (True, 2))
print("\n".join(wrong))
sys.exit(1 if wrong else 0)

"""`python -m gputrace.executors ray|dask [ADDRESS]`: runs the tasks of `gputrace map` on an engine that is there already.

The plan comes on the standard input, what became of each task goes to the standard output as a line of JSON, and the files of tasks into
the plan's folder. A task is run on the host that it names, and again where its worker or its process was lost.
"""
import json
import os
import sys
from typing import Any, Callable, Dict, Iterator, List, Set, Tuple

Plan = Dict[str, Any]
Task = Dict[str, Any]
Result = Tuple[int, Dict[str, bytes], str]


def _worker() -> Callable[[Plan, Task], Result]:
    """What runs on a worker. It is made here, and nothing of this module is needed there; the same as `Task::run` in map/plan.rs."""

    def work(plan: Dict[str, Any], task: Dict[str, Any]) -> Result:
        import os
        import shutil
        import subprocess
        import tempfile

        program = plan["program"]
        if not os.access(program, os.X_OK):
            try:
                from gputrace._installed import program_path
                program = program_path()
            except Exception:
                program = shutil.which("gputrace")
        if not program:
            raise FileNotFoundError(f"{plan['program']} is not on this host, and gputrace is neither installed nor on PATH")
        # What is said must not hang on who asks.
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LD_PRELOAD")}
        writes_files = task["arguments"][0] == "reduce"
        folder = tempfile.mkdtemp(prefix="gputrace-map-")
        try:
            to = ["-o", folder] if writes_files else []
            ended = subprocess.run([program, *task["arguments"], *to, task["trace"]], env=environment, stdin=subprocess.DEVNULL,
                                   capture_output=True)
            if ended.returncode < 0:
                raise ChildProcessError(f"{task['name']}: ended by signal {-ended.returncode}")
            files = {task["name"]: ended.stdout}
            if writes_files:
                files = {}
                for name in sorted(os.listdir(folder)):
                    with open(os.path.join(folder, name), "rb") as file:
                        files[name] = file.read()
            return ended.returncode, files, ended.stderr.decode(errors="replace")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return work


def on_ray(plan: Plan, address: str) -> Iterator[Tuple[int, Any]]:
    """Tasks as Ray's; numbers with results or errors, in the order in which they end."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address=address or None, log_to_driver=False, configure_logging=False)
    nodes = {node["NodeManagerHostname"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    work = ray.remote(num_cpus=1, max_retries=plan["tries"] - 1, retry_exceptions=[ChildProcessError])(_worker())
    shared, waiting = ray.put(plan_for_workers(plan)), {}
    for number, task in enumerate(plan["tasks"]):
        how = {}
        if task["host"]:
            if task["host"] not in nodes:
                sys.exit(f"gputrace: Ray has no host {task['host']}: it has {', '.join(sorted(nodes))}")
            how = {"scheduling_strategy": NodeAffinitySchedulingStrategy(nodes[task["host"]], soft=False)}
        waiting[work.options(**how).remote(shared, task)] = number
    while waiting:
        ended, _ = ray.wait(list(waiting))
        for reference in ended:
            number = waiting.pop(reference)
            try:
                yield number, ray.get(reference)
            except Exception as error:
                yield number, error
            del reference
    ray.shutdown()


def on_dask(plan: Plan, address: str) -> Iterator[Tuple[int, Any]]:
    """Tasks as Dask's; numbers with results or errors, in the order in which they end."""
    from distributed import Client, as_completed
    from distributed.comm import get_address_host

    client = Client(address) if address else Client(processes=True, threads_per_worker=1, dashboard_address=None)
    with client:
        client.wait_for_workers(1, timeout=60)
        # By the host's address and not the worker's: one that is started again has another port.
        hosts: Dict[str, Set[str]] = {}
        room: Dict[str, int] = {"": 0}
        for at, (host, threads) in client.run(_host()).items():
            hosts.setdefault(host, set()).add(get_address_host(at))
            for key in ("", host):
                room[key] = room.get(key, 0) + threads
        # Dask counts whatever waits at a worker that is lost as tried there: no more are handed out than can run.
        waiting: Dict[str, List[int]] = {}
        for number, task in enumerate(plan["tasks"]):
            if task["host"] and task["host"] not in hosts:
                sys.exit(f"gputrace: Dask has no worker on {task['host']}: it has some on {', '.join(sorted(hosts))}")
            waiting.setdefault(task["host"] or "", []).append(number)
        # Not scattered: what is scattered goes with the worker that has it.
        work, shared, numbers = _worker(), plan_for_workers(plan), {}

        def next_of(host: str) -> Any:
            number = waiting[host].pop(0)
            workers = sorted(hosts[host]) if host else None
            future = client.submit(work, shared, plan["tasks"][number], workers=workers, retries=plan["tries"] - 1, pure=False)
            numbers[future] = number, host
            return future

        running = as_completed([next_of(host) for host in waiting for _ in range(min(room[host], len(waiting[host])))])
        for future in running:
            number, host = numbers.pop(future)
            if waiting[host]:
                running.add(next_of(host))
            error = future.exception()
            yield number, future.result() if error is None else error


def _host() -> Callable[[Any], Tuple[str, int]]:
    """A worker's host, and how many tasks it runs at once."""

    def host(dask_worker: Any) -> Tuple[str, int]:
        import socket
        return socket.gethostname(), dask_worker.state.nthreads

    return host


def plan_for_workers(plan: Plan) -> Plan:
    """What each task needs of the plan, without the others."""
    return {"program": plan["program"]}


ENGINES = {"ray": on_ray, "dask": on_dask}


def put(folder: str, name: str, data: bytes) -> None:
    """Writes all of a file or nothing."""
    part = os.path.join(folder, f".{name}.{os.getpid()}")
    try:
        with open(part, "wb") as file:
            file.write(data)
        os.replace(part, os.path.join(folder, name))
    except OSError:
        if os.path.exists(part):
            os.remove(part)
        raise


def main() -> None:
    """Reads the plan, runs its tasks, and says what became of each."""
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in ENGINES:
        sys.exit(f"usage: python -m gputrace.executors {'|'.join(ENGINES)} [ADDRESS]")
    plan = json.load(sys.stdin)
    # Engines speak on the standard output; what is said here goes where it was.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        for number, result in ENGINES[sys.argv[1]](plan, sys.argv[2] if len(sys.argv) > 2 else ""):
            if isinstance(result, Exception):
                print(f"gputrace: {plan['tasks'][number]['name']}: {result}", file=sys.stderr)
                continue
            status, files, error = result
            for name, data in files.items():
                put(plan["output"], name, data)
            print(json.dumps({"task": number, "status": status, "files": sorted(files), "error": error}), file=out, flush=True)
    except ImportError as error:
        sys.exit(f"gputrace: {error}: pip install 'gputrace[{sys.argv[1]}]'")


if __name__ == "__main__":
    main()

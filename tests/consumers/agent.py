"""agent.py GPUTRACE GOLDEN: an agent, by the protocol's own client library, asks `gputrace mcp` why three runs ran out of memory, grew or wasted
memory, and what would have helped. Every answer is what the verb itself says with --json, to the byte. Exit status 77 where the library is not
there (tests/consumers/setup.sh)."""
import json, os, subprocess, sys

try:
    import anyio
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client
except ImportError as error:
    print(f"no client of the Model Context Protocol: {error} (tests/consumers/setup.sh)")
    sys.exit(77)

gputrace, golden = sys.argv[1], os.path.realpath(sys.argv[2])
# What was asked, and the verb's own words for it.
RUNS = {
    "caught-oom.gtr": [("oom", ["oom"], {}), ("tune", ["tune"], {}), ("tune", ["tune", "--limit=300MiB"], {"limit": "300MiB"})],
    "running-total.gtr": [("leaks", ["leaks"], {}), ("memory_at", ["tree", "--end", "--group-by=owner"], {"moment": "end", "group_by": "owner"})],
    "varying-lengths.gtr": [
        ("tune", ["tune"], {}),
        ("replay", ["replay", "--policy=torch", "--policy=torch:expandable_segments:True"],
         {"policies": ["torch", "torch:expandable_segments:True"]}),
        ("summary", ["summary"], {}),
        ("ranks", ["ranks"], {}),
    ],
}


def parsed(text):
    """JSON whose numbers stay the text that they were."""
    return json.loads(text, parse_int=str, parse_float=str)


def own(verb, name):
    command = [gputrace, verb[0], "--json", *verb[1:], os.path.join(golden, name)]
    return parsed(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def same(what, found, expected):
    if found != expected:
        sys.exit(f"{what}:\n{json.dumps(found, indent=1)[:3000]}\ninstead of\n{json.dumps(expected, indent=1)[:3000]}")


async def ask(client, tool, **arguments):
    answer = await client.call_tool(tool, arguments)
    text = [part.text for part in answer.content]
    if answer.is_error:
        sys.exit(f"{tool} {arguments}: {text}")
    return text


async def talk(mode):
    server = StdioServerParameters(command=gputrace, args=["mcp", "--allow", golden])
    async with Client(stdio_client(server), mode=mode) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        for name, tool in tools.items():
            same(f"{name} only reads", [tool.annotations.read_only_hint, tool.annotations.destructive_hint], [True, False])
        for name, questions in RUNS.items():
            verdict = await ask(client, "verdict", path=name)
            expected = own(["report"], name)
            same(f"causes of {name}", parsed((await ask(client, "causes", path=name))[0]), expected)
            for process in expected["processes"]:
                del process["sections"]
            same(f"verdict of {name}", parsed(verdict[0]), expected)
            found = expected["processes"][0]["verdict"]
            print(f"{name}: {found['what']}\n  {found['cause']} at {found['call_site']}\n  {found['fix']} ({found['confidence']})")
            for tool, verb, arguments in questions:
                answer = await ask(client, tool, path=name, **arguments)
                same(f"{tool} of {name}", parsed(answer[0]), own(verb, name))
        # A part of an answer, and the rest of a list.
        whole = own(["report"], "caught-oom.gtr")["processes"][0]["sections"]
        part = await ask(client, "causes", path="caught-oom.gtr", pointer="/processes/0/sections", skip=2)
        same("a part", parsed(part[0]), whole[2:])
        short = await ask(client, "causes", path="caught-oom.gtr", max_bytes=2000)
        same("a short answer says that it is one", (len(short[0].encode()) <= 2000, "Shortened" in short[1]), (True, True))
        # Two at once.
        async with anyio.create_task_group() as together:
            answers = {}

            async def one(name):
                answers[name] = parsed((await ask(client, "oom", path=name))[0])

            for name in ("caught-oom.gtr", "version1.gtr"):
                together.start_soon(one, name)
        same("two at once", answers, {name: own(["oom"], name) for name in answers})
        refused = await client.call_tool("oom", {"path": "/etc/passwd"})
        same("a path outside is refused", refused.is_error, True)


# The handshake of earlier releases of the protocol, and what the library and the server agree on.
for mode in ("legacy", "auto"):
    anyio.run(talk, mode)

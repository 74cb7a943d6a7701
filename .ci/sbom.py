#!/usr/bin/env python3
"""Writes what the binary is built from as CycloneDX 1.6: every crate with its licence, checksum and dependencies.

    .ci/sbom.py [TARGET] > kvlane.cdx.json

Taken from `cargo metadata` and Cargo.lock, without a network. The same sources give the same bytes.
"""
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import tomllib
import uuid

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = sys.argv[1] if len(sys.argv) > 1 else "x86_64-unknown-linux-gnu"


def metadata():
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", TARGET]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)


def reached(graph, start):
    """What `start` is built from, itself included: all but what only tests need."""
    edges, open_ = {}, [start]
    while open_:
        node = open_.pop()
        if node in edges:
            continue
        needed = [d["pkg"] for d in graph[node]["deps"] if any(k["kind"] != "dev" for k in d["dep_kinds"])]
        edges[node] = sorted(set(needed))
        open_.extend(needed)
    return edges


def licence(package):
    # A slash is how crates wrote "or" before SPDX.
    expression = re.sub(r"\s*/\s*", " OR ", package["license"] or "")
    if not expression:
        return {}
    one = re.fullmatch(r"[A-Za-z0-9.+-]+", expression)
    return {"licenses": [{"license": {"id": expression}} if one else {"expression": expression}]}


def component(package, checksums, kind="library"):
    name, version = package["name"], package["version"]
    purl = f"pkg:cargo/{name}@{version}"
    ours = package["source"] is None
    described = {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl, "scope": "required"}
    if package.get("description"):
        described["description"] = " ".join(package["description"].split())
    described |= licence(package)
    if not ours:
        described["hashes"] = [{"alg": "SHA-256", "content": checksums[name, version]}]
    if package.get("repository"):
        described["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return described


def main():
    lock = (ROOT / "Cargo.lock").read_bytes()
    checksums = {(p["name"], p["version"]): p.get("checksum") for p in tomllib.loads(lock.decode())["package"]}
    data = metadata()
    packages = {p["id"]: p for p in data["packages"]}
    graph = {n["id"]: n for n in data["resolve"]["nodes"]}
    start = next(i for i, p in packages.items() if p["name"] == "kvlane" and p["source"] is None)
    edges = reached(graph, start)
    ref = lambda i: f"pkg:cargo/{packages[i]['name']}@{packages[i]['version']}"
    identity = hashlib.sha256(lock + TARGET.encode()).hexdigest()
    bom = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, identity)}",
        "version": 1,
        "metadata": {
            "component": component(packages[start], checksums, "application"),
            "properties": [{"name": "kvlane:target", "value": TARGET}],
        },
        "components": sorted(
            (component(packages[i], checksums) for i in edges if i != start), key=lambda c: c["bom-ref"]
        ),
        "dependencies": sorted(
            ({"ref": ref(i), "dependsOn": sorted(map(ref, needs))} for i, needs in edges.items()),
            key=lambda d: d["ref"],
        ),
    }
    json.dump(bom, sys.stdout, indent=1, ensure_ascii=False)
    print()
    print(f"sbom: {len(bom['components'])} crates for {TARGET}", file=sys.stderr)


main()

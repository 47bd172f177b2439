#!/usr/bin/env python3
"""sbom.py FOLDER: writes gputrace-VERSION.cdx.json, a bill of materials (CycloneDX 1.6) of what is in the program and the library: each crate
with the checksum that Cargo.lock has, and Rust's standard library. Needs cyclonedx-python-lib, which also checks it by the format's schema.
"""
import os
import re
import subprocess
import sys
import uuid
from datetime import datetime, timezone

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

import pack


def main():
    version = pack.version()
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_OID, f"gputrace {version}"))
    bom.metadata.timestamp = datetime.fromtimestamp(pack.EPOCH, timezone.utc)
    bom.metadata.component = Component(
        name="gputrace", version=version, type=ComponentType.APPLICATION, bom_ref="gputrace",
        licenses=[LicenseExpression(pack.pyproject()["license"])]
    )
    sums = checksums()
    components = [crate(package, sums[package["name"], package["version"]]) for package in pack.crates("x86_64", with_macros=False)]
    components.append(standard_library())
    for component in components:
        bom.components.add(component)
    bom.register_dependency(bom.metadata.component, components)
    text = JsonV1Dot6(bom).output_as_string(indent=1) + "\n"
    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    assert wrong is None, wrong
    path = os.path.join(sys.argv[1], f"gputrace-{version}.cdx.json")
    os.makedirs(sys.argv[1], exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    print(f"{path}: {len(components)} components, valid CycloneDX 1.6")


def crate(package, checksum):
    purl = PackageURL("cargo", name=package["name"], version=package["version"])
    # Some crates write a slash for OR, as Cargo's first form was.
    licence = package["license"].replace("/", " OR ")
    return Component(
        name=package["name"], version=package["version"], type=ComponentType.LIBRARY, purl=purl, bom_ref=str(purl),
        licenses=[LicenseExpression(licence)], hashes=[HashType(alg=HashAlgorithm.SHA_256, content=checksum)]
    )


def standard_library():
    """Of the compiler that builds here."""
    said = subprocess.run(["rustc", "--version", "--verbose"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return Component(
        name="std", version=re.search("(?m)^release: (.*)$", said)[1], type=ComponentType.LIBRARY, bom_ref="rust-std",
        description="Rust's standard library", licenses=[LicenseExpression("MIT OR Apache-2.0")]
    )


def checksums():
    """By name and version."""
    lock = pack.tomllib.loads(pack.read(f"{pack.ROOT}/Cargo.lock").decode())
    return {(package["name"], package["version"]): package["checksum"] for package in lock["package"] if "checksum" in package}


main()

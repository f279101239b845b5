"""`tinyvllm doctor`: what this machine has and lacks for an engine, a line each with what to do. Exit code 1 if there is an error."""

from __future__ import annotations

import argparse
import dataclasses
import json

from tinyvllm.config.devices import parse_device


def run(options: argparse.Namespace) -> int:
    from tinyvllm.doctor.examination import examine
    from tinyvllm.doctor.machine import Finding, Machine, Status

    machine = Machine(parse_device("--device", options.device), options.all)
    findings: list[Finding] = []
    for finding in examine(machine):
        findings.append(finding)
        if not options.json:
            print(f"{finding.status.value:8}{finding.name}: {finding.text}", flush=True)
            if finding.advice:
                print(f"{'':8}-> {finding.advice}", flush=True)
    counts = {status.value: sum(one.status is status for one in findings) for status in Status}
    if options.json:
        print(json.dumps({"findings": [dataclasses.asdict(one) for one in findings], **counts}))
    else:
        print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return 1 if counts["error"] else 0

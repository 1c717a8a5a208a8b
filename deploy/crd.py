"""Writes the definition of TrainingJobs for Kubernetes: a job's spec as an OpenAPI schema.

    python -m deploy.crd

The API server refuses what the schema excludes. What it cannot say (values of several types, rules
between fields) and fields that it does not know are let through: the controller refuses these in
the same words as everywhere, where the API server would drop an unknown field without a word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from controller.kube.training_job import GROUP, KIND, PLURAL, VERSION
from outlast.spec import JobSpec

FILE = Path(__file__).parent / "kubernetes" / "training-jobs.yaml"
_HEADER = """\
# TrainingJobs: `kubectl apply` of one runs a job, `kubectl get trainingjobs` shows it.
# Generated from the schema of job specs by `python -m deploy.crd`.
"""
_KEPT = ("description", "enum", "minItems", "minLength", "pattern", "type")
_BOUNDS = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
# A larger one is rounded on its way.
_LARGEST_EXACT = 2**53
_ANY = {"x-kubernetes-preserve-unknown-fields": True}

Json = dict[str, Any]


def main() -> None:
    FILE.write_text(text())


def text() -> str:
    """The file."""
    return _HEADER + yaml.safe_dump(definition(), sort_keys=False, width=100)


def definition() -> Json:
    """The object that defines TrainingJobs."""
    columns = [
        ("State", "string", ".status.state"),
        ("Step", "integer", ".status.step"),
        ("Steps", "integer", ".status.steps"),
        ("Restarts", "integer", ".status.restarts"),
        ("Job", "string", ".status.jobId"),
        ("Age", "date", ".metadata.creationTimestamp"),
    ]
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": _object_schema()},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path} for name, kind, path in columns
        ],
    }
    labels = {"app.kubernetes.io/name": "outlast", "app.kubernetes.io/component": "controller"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}", "labels": labels},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["tj"],
            },
            "versions": [version],
        },
    }


def _object_schema() -> Json:
    document = JobSpec.model_json_schema()
    spec = _structural(document, document["$defs"])
    # The object has a name already.
    spec.pop("required")
    suspend = {
        "type": "boolean",
        "description": "true: do not submit the job yet, or pause it; false lets it go on.",
    }
    status = {"type": "object", **_ANY}
    return {
        "type": "object",
        "required": ["spec"],
        "properties": {
            "spec": {**spec, "properties": {"suspend": suspend, **spec["properties"]}},
            "status": status,
        },
    }


def _structural(schema: Json, known: dict[str, Json]) -> Json:
    """A JSON schema as Kubernetes takes it: without references, alternatives and defaults."""
    if "$ref" in schema:
        found = _structural(known[schema["$ref"].rpartition("/")[2]], known)
        return {**found, **{key: schema[key] for key in ("description",) if key in schema}}
    described = {key: schema[key] for key in ("description",) if key in schema}
    alternatives = schema.get("anyOf", ())
    others = [each for each in alternatives if each.get("type") != "null"]
    if alternatives:
        # Values of several types are the controller's to check.
        one = _structural(others[0], known) if len(others) == 1 else _ANY
        if len(others) < len(alternatives):
            # No value of an enum can be null there.
            one = {key: value for key, value in one.items() if key != "enum"} | {"nullable": True}
        return {**described, **one}
    found = {key: schema[key] for key in _KEPT if key in schema}
    if "const" in schema:
        found["enum"] = [schema["const"]]
    for bound, exclusive in _BOUNDS:
        for key in (bound, exclusive):
            if key in schema and abs(schema[key]) < _LARGEST_EXACT:
                found[bound] = schema[key]
                if key == exclusive:
                    found[exclusive] = True
    if "items" in schema:
        found["items"] = _structural(schema["items"], known)
    if schema.get("type") == "object":
        found |= _fields(schema, known)
    return found


def _fields(schema: Json, known: dict[str, Json]) -> Json:
    if "properties" not in schema:
        values = schema.get("additionalProperties")
        return {"additionalProperties": _structural(values, known)} if values else _ANY
    fields = {name: _structural(each, known) for name, each in schema["properties"].items()}
    required = {key: schema[key] for key in ("required",) if key in schema}
    return {"properties": fields, **required, **_ANY}


if __name__ == "__main__":
    main()

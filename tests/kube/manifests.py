"""The files of deploy/kubernetes, as documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
NAMESPACE = "outlast"
CONTROLLER = "outlast-controller"
DEFINITION = "CustomResourceDefinition"
RIGHTS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")

Document = dict[str, Any]


def kustomization() -> Document:
    """The list of what `kubectl apply -k` takes."""
    found: Document = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    return found


def documents() -> list[Document]:
    """Every object of the base, in the order of its files."""
    return [
        document
        for name in kustomization()["resources"]
        for document in yaml.safe_load_all((FOLDER / name).read_text())
    ]


def rights(namespace: str) -> list[Document]:
    """The controller's account, roles and bindings, moved to another namespace.

    What belongs to no namespace is renamed, so that tests do not share it.
    """
    return [moved(document, namespace) for document in documents() if document["kind"] in RIGHTS]


def granted() -> set[tuple[str, str]]:
    """Verb and resource of everything that the controller's roles allow."""
    found = set()
    for document in documents():
        for rule in document.get("rules") or ():
            for group in rule["apiGroups"]:
                for what in rule["resources"]:
                    plural, slash, subresource = what.partition("/")
                    name = f"{plural}.{group}" if group else plural
                    found |= {(verb, name + slash + subresource) for verb in rule["verbs"]}
    return found


def moved(document: Document, namespace: str) -> Document:
    """A copy of an object of the base in another namespace, as `kustomize` would move it."""
    metadata = dict(document["metadata"])
    document = {**document, "metadata": metadata}
    if "namespace" in metadata:
        metadata["namespace"] = namespace
    else:
        metadata["name"] += f"-{namespace}"
        metadata["labels"] = {**(metadata.get("labels") or {}), "test-namespace": namespace}
    if document["kind"].endswith("Binding"):
        document["subjects"] = [
            {**subject, "namespace": namespace} for subject in document["subjects"]
        ]
        if document["roleRef"]["kind"] == "ClusterRole":
            name = f"{document['roleRef']['name']}-{namespace}"
            document["roleRef"] = {**document["roleRef"], "name": name}
    return document

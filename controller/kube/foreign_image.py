"""An agent in the image of a job: it brings a Python of its own along.

An init container of the agents' image copies its Python, with all that is installed there, to a
volume; in the job's image it lies at the same path, and nothing of the image is touched.
"""

from __future__ import annotations

from controller.kube.observed import ANNOTATION_IMAGE, CONTAINER, Json

# As in deploy/Dockerfile: a Python that runs from wherever it is put, on any Linux with glibc.
RUNTIME_DIR = "/opt/outlast"
_VOLUME = "outlast-runtime"
_COPY_DIR = "/opt/outlast-copy"


def in_image(pod: Json, image: str, *, agents_image: str) -> Json:
    """An agent's pod, with the agent's container in another image."""
    metadata, spec = pod["metadata"], pod["spec"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION_IMAGE: image}
    containers = [
        _moved(each, image) if each["name"] == CONTAINER else each for each in spec["containers"]
    ]
    (agent,) = (each for each in containers if each["name"] == CONTAINER)
    init = [*spec.get("initContainers", ()), _copying(agents_image, agent)]
    volumes = [*spec["volumes"], {"name": _VOLUME, "emptyDir": {}}]
    return {
        **pod,
        "metadata": {**metadata, "annotations": annotations},
        "spec": {**spec, "containers": containers, "initContainers": init, "volumes": volumes},
    }


def _moved(agent: Json, image: str) -> Json:
    """The agent's container with our Python, which heeds no variables that are for another."""
    _, *options = agent["command"]
    runtime = {"name": _VOLUME, "mountPath": RUNTIME_DIR, "subPath": "outlast", "readOnly": True}
    return {
        **agent,
        "image": image,
        "command": [f"{RUNTIME_DIR}/bin/python3", "-E", *options],
        "args": [*agent["args"], "--image", image],
        "volumeMounts": [*agent["volumeMounts"], runtime],
    }


def _copying(agents_image: str, agent: Json) -> Json:
    """The container that brings our Python, with the rights of the agent's.

    Times are kept: Python compiles anew what is newer than its compiled form. The folder itself
    is copied, as that of the volume is not ours to change.
    """
    inherited = ("securityContext", "imagePullPolicy")
    rights: Json = {key: agent[key] for key in inherited if key in agent}
    return {
        "name": "runtime",
        "image": agents_image,
        "command": ["cp", "-a", RUNTIME_DIR, f"{_COPY_DIR}/"],
        "volumeMounts": [{"name": _VOLUME, "mountPath": _COPY_DIR}],
        **rights,
    }

"""The kinds that the server keeps, and how a path names them."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote

from tests.kube.fake.errors import no_such_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One kind."""

    plural: str
    kind: str
    group: str = ""
    version: str = "v1"
    namespaced: bool = True
    subresources: tuple[str, ...] = ()
    counts_generations: bool = False
    """Whether a change of `spec` raises metadata.generation."""
    needs_version: bool = False
    """Whether a PUT without a resourceVersion is refused."""
    returns_deleted: bool = False
    """Whether DELETE answers with the object rather than with a Status."""

    @property
    def api_version(self) -> str:
        """As `apiVersion` spells it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def name(self) -> str:
        """As error messages spell it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a path names: a collection, an object or a subresource of one."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""


def resources(policy_version: str) -> tuple[Resource, ...]:
    """Every kind; `policy_version` is v1 as in 1.25 and later, or v1beta1 as in 1.20."""
    rbac, apps = "rbac.authorization.k8s.io", "apps"
    return (
        Resource(plural="namespaces", kind="Namespace", namespaced=False, subresources=("status",)),
        Resource(plural="nodes", kind="Node", namespaced=False, subresources=("status",)),
        Resource(
            plural="pods",
            kind="Pod",
            subresources=("status", "binding", "eviction"),
            returns_deleted=True,
        ),
        Resource(plural="services", kind="Service", subresources=("status",)),
        Resource(plural="configmaps", kind="ConfigMap"),
        Resource(plural="secrets", kind="Secret"),
        Resource(plural="events", kind="Event"),
        Resource(plural="serviceaccounts", kind="ServiceAccount", subresources=("token",)),
        Resource(plural="persistentvolumeclaims", kind="PersistentVolumeClaim"),
        Resource(plural="leases", kind="Lease", group="coordination.k8s.io", needs_version=True),
        Resource(
            plural="poddisruptionbudgets",
            kind="PodDisruptionBudget",
            group="policy",
            version=policy_version,
            subresources=("status",),
            counts_generations=True,
            needs_version=True,
        ),
        Resource(
            plural="networkpolicies",
            kind="NetworkPolicy",
            group="networking.k8s.io",
            counts_generations=True,
        ),
        Resource(
            plural="trainingjobs",
            kind="TrainingJob",
            group="outlast.dev",
            version="v1alpha1",
            subresources=("status",),
            counts_generations=True,
            needs_version=True,
        ),
        Resource(plural="deployments", kind="Deployment", group=apps, counts_generations=True),
        Resource(plural="roles", kind="Role", group=rbac),
        Resource(plural="rolebindings", kind="RoleBinding", group=rbac),
        Resource(plural="clusterroles", kind="ClusterRole", group=rbac, namespaced=False),
        Resource(
            plural="clusterrolebindings", kind="ClusterRoleBinding", group=rbac, namespaced=False
        ),
    )


def parse_path(path: str, known: tuple[Resource, ...]) -> Target:
    """What a path names; ApiError 404 for what is not served."""
    parts = [unquote(part) for part in path.strip("/").split("/")]
    match parts:
        case ["api", version, *rest]:
            group = ""
        case ["apis", group, version, *rest]:
            pass
        case _:
            raise no_such_path()
    namespace = ""
    # /namespaces/NAME and its status are the namespace itself; the rest lies within one.
    if len(rest) >= 3 and rest[0] == "namespaces" and rest[2] != "status":
        namespace, rest = rest[1], rest[2:]
    if not 1 <= len(rest) <= 3:
        raise no_such_path()
    plural, name, subresource = [*rest, "", ""][:3]
    for resource in known:
        if (resource.group, resource.version, resource.plural) == (group, version, plural):
            break
    else:
        raise no_such_path()
    if subresource and subresource not in resource.subresources:
        raise no_such_path()
    if (namespace and not resource.namespaced) or (name and resource.namespaced and not namespace):
        raise no_such_path()
    return Target(resource=resource, namespace=namespace, name=name, subresource=subresource)

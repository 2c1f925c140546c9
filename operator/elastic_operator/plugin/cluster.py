"""The plugin's client of the API server. Every failure becomes a PluginError with one line that says what to do."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

import httpx2
from lightkube import Client
from lightkube.config.kubeconfig import SingleConfig
from lightkube.core.exceptions import ApiError, ConfigError
from lightkube.types import PatchType

from elastic_operator.cluster.resources import EVENT, LIVE, NODE, POD, TRAINING_JOB
from elastic_operator.plugin.errors import Exit, PluginError
from reshard.contract import GROUP, PLURAL, Label

Json = dict[str, Any]

_TIMEOUT = httpx2.Timeout(30.0, connect=10.0)
_MANAGER = "kubectl-etj"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A client of one cluster with a default namespace."""

    client: Client
    config: SingleConfig
    namespace: str

    def job(self, name: str) -> Json:
        """Read the resource of a job.

        Raises:
            PluginError: it does not exist (the message lists similar names), or cannot be read.
        """
        with self._plugin_errors(f"read job {name}"):
            try:
                return dict(self.client.get(TRAINING_JOB, name, namespace=self.namespace))
            except ApiError as error:
                if error.status.code != HTTPStatus.NOT_FOUND or not _names_an_object(error):
                    raise
        raise PluginError(Exit.REFUSED, self._no_such_job(name))

    def jobs(self, *, everywhere: bool = False) -> list[Json]:
        """List the jobs of the namespace, or of all namespaces."""
        where = "*" if everywhere else self.namespace
        with self._plugin_errors("list jobs"):
            return [dict(item) for item in self.client.list(TRAINING_JOB, namespace=where, chunk_size=500)]

    def events(self, name: str) -> list[Json]:
        """List the Events about one job."""
        fields: dict[str, Any] = {"involvedObject.kind": "ElasticTrainingJob", "involvedObject.name": name}
        with self._plugin_errors("list events"):
            return [dict(item) for item in self.client.list(EVENT, namespace=self.namespace, fields=fields)]

    def pods(self, name: str) -> list[Json]:
        """List the pods of one job."""
        with self._plugin_errors("list pods"):
            labels: dict[str, Any] = {str(Label.JOB): name}
            return [dict(item) for item in self.client.list(POD, namespace=self.namespace, labels=labels)]

    def nodes(self) -> list[Json]:
        """List all nodes of the cluster."""
        with self._plugin_errors("list nodes of the whole cluster"):
            return [dict(item) for item in self.client.list(NODE, chunk_size=500)]

    def live_pods(self) -> list[Json]:
        """List the pods of all namespaces that occupy the resources they request."""
        with self._plugin_errors("list pods of all namespaces"):
            return [dict(item) for item in self.client.list(POD, namespace="*", fields=LIVE, chunk_size=500)]

    def patch(self, name: str, body: Mapping[str, Any]) -> Json:
        """Merge `body` into the resource of a job; return the result."""
        with self._plugin_errors(f"change job {name}"):
            answer = self.client.patch(
                TRAINING_JOB,
                name,
                dict(body),
                namespace=self.namespace,
                patch_type=PatchType.MERGE,
                field_manager=_MANAGER,
            )
            return dict(answer)

    def logs(self, pod: str, container: str, **options: Any) -> Iterator[str]:
        """Yield the lines of one container's log."""
        with self._plugin_errors(f"read logs of pod {pod}"):
            yield from self.client.log(pod, namespace=self.namespace, container=container, newlines=False, **options)

    def _no_such_job(self, name: str) -> str:
        jobs = self.jobs()
        text = f"no ElasticTrainingJob {name} in namespace {self.namespace}"
        elsewhere: list[str] = []
        with contextlib.suppress(PluginError):
            elsewhere = [item["metadata"]["namespace"] for item in self.jobs(everywhere=True) if _name(item) == name]
        if elsewhere:
            return f"{text}; there is one in {', '.join(sorted(elsewhere))}: use -n"
        names = sorted(_name(item) for item in jobs)
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        if near:
            return f"{text}; did you mean {' or '.join(near)}?"
        if not names:
            return f"{text}, nor any other; `kubectl etj list -A` shows all namespaces"
        return f"{text}; there are {', '.join(names[:5])}{' and others' if len(names) > 5 else ''}"

    @contextlib.contextmanager
    def _plugin_errors(self, what: str) -> Iterator[None]:
        """Convert every failure of a request to a PluginError that names the action `what`."""
        server = self.config.cluster.server
        try:
            yield
        except ApiError as error:
            raise _refusal(error, what, self.config.context_name) from error
        except httpx2.HTTPStatusError as error:
            if error.response.status_code == HTTPStatus.NOT_FOUND and f"/{GROUP}/" in str(error.request.url):
                raise _not_installed() from error
            raise PluginError(Exit.REFUSED, f"cannot {what}: {server} answers {error.response.status_code}") from error
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            text = f"cluster {server} (context {self.config.context_name}) cannot be reached: {reason}"
            raise PluginError(Exit.UNREACHABLE, text) from error
        except (ConfigError, OSError) as error:
            text = f"credentials of context {self.config.context_name} cannot be used: {error}"
            raise PluginError(Exit.UNREACHABLE, text) from error


def connect(config: SingleConfig, namespace: str | None) -> Cluster:
    """Create the client of a cluster; sends no request.

    Args:
        config: the cluster and the credentials.
        namespace: `--namespace`; None for that of the context.

    Raises:
        PluginError: the credentials cannot be used.
    """
    try:
        client = Client(config=config, timeout=_TIMEOUT, lazy=False)
    except (ConfigError, OSError, ValueError) as error:
        text = f"credentials of context {config.context_name} cannot be used: {error}"
        raise PluginError(Exit.UNREACHABLE, text) from error
    return Cluster(client=client, config=config, namespace=namespace or config.namespace)


def _name(item: Json) -> str:
    return str(item["metadata"]["name"])


def _names_an_object(error: ApiError) -> bool:
    # Without the CRD the path itself is unknown, and the answer names no object.
    return bool(error.status.details and error.status.details.name)


def _not_installed() -> PluginError:
    text = f"the cluster does not know {PLURAL}.{GROUP}: install the CRD (crds/elastictrainingjobs.yaml, or the chart)"
    return PluginError(Exit.NOT_INSTALLED, text)


def _refusal(error: ApiError, what: str, context: str) -> PluginError:
    status = error.status
    message = " ".join((status.message or "").split())
    if status.code == HTTPStatus.NOT_FOUND and f"/{GROUP}/" in str(error.request.url) and not _names_an_object(error):
        return _not_installed()
    if status.code == HTTPStatus.FORBIDDEN:
        return PluginError(Exit.REFUSED, f"you may not {what}: {message}")
    if status.code == HTTPStatus.UNAUTHORIZED:
        text = f"the cluster does not accept the credentials of context {context}: {message}"
        return PluginError(Exit.UNREACHABLE, text)
    return PluginError(Exit.REFUSED, f"cannot {what}: {message}")

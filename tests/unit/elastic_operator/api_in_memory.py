"""An API server in memory, as far as the operator's reads and writes go: names, UIDs, preconditions, selectors."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from elastic_operator.client.api_client import KubernetesClient
from elastic_operator.client.credentials import Credentials

_PATH = re.compile(
    r"/?(?:api|apis/[^/]+)/[^/]+(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/status)?"
)


class Api:
    """Objects by plural, namespace and name. `deleted` and `denied` tell what was asked of it.

    Attributes:
        forbidden: plurals that are refused.
        unserved: plurals of kinds that it does not know.
        patched: name and body of every patch.
        conflicts: requests, by method and plural, that are answered with a conflict, each once.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.deleted: list[tuple[str, str]] = []
        self.unconditional: list[str] = []
        self.forbidden: set[str] = set()
        self.unserved: set[str] = set()
        self.patched: list[tuple[str, dict[str, Any]]] = []
        self.conflicts: set[tuple[str, str]] = set()
        self._numbers = itertools.count(1)

    def put(self, plural: str, item: Mapping[str, Any], uid: str = "") -> dict[str, Any]:
        """Have an object, whoever made it."""
        made = copy.deepcopy(dict(item))
        meta = made["metadata"]
        meta.setdefault("namespace", "ns")
        meta |= {"uid": uid or meta.get("uid") or f"uid-{next(self._numbers)}", "resourceVersion": "1"}
        self.objects[plural, meta["namespace"], meta["name"]] = made
        return made

    def names(self, plural: str) -> set[str]:
        return {name for kind, _, name in self.objects if kind == plural}

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[KubernetesClient]:
        """A real client that talks to it over HTTP."""
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        async with TestServer(application) as server:
            client = KubernetesClient(Credentials(server=str(server.make_url("")).rstrip("/")))
            try:
                yield client
            finally:
                await client.close()

    async def _answer(self, request: web.Request) -> web.Response:
        found = _PATH.fullmatch(request.path)
        assert found, request.path
        namespace, plural, name = found["namespace"] or "", found["plural"], found["name"]
        body = json.loads(content) if (content := await request.read()) else {}
        key = (plural, namespace, name or "")
        if plural in self.unserved:
            return web.Response(status=404, text="404 page not found")
        if plural in self.forbidden:
            return _status(403, "Forbidden", f"{plural} is forbidden")
        if (request.method, plural) in self.conflicts:
            self.conflicts.remove((request.method, plural))
            return _status(
                409, "Conflict", "the object has been modified; please apply your changes to the latest version"
            )
        if request.method == "GET" and name is None:
            return self._list(plural, namespace, request.query.get("labelSelector") or "")
        if request.method == "POST":
            key = (plural, namespace, body["metadata"]["name"])
            if key in self.objects:
                return _status(409, "AlreadyExists", f"{plural} {key[2]} already exists")
            return web.json_response(self.put(plural, body), status=201)
        item = self.objects.get(key)
        if item is None:
            return _status(404, "NotFound", f"{plural} {name} not found")
        if request.method == "DELETE":
            uid = (body.get("preconditions") or {}).get("uid")
            if uid is None:
                self.unconditional.append(f"{plural}/{name}")
            elif uid != item["metadata"]["uid"]:
                return _status(409, "Conflict", "the UID in the precondition differs")
            del self.objects[key]
            self.deleted.append((plural, name))
            return _status(200, "", "")
        if request.method == "PATCH":
            meta = body.get("metadata") or {}
            if meta.get("uid", item["metadata"]["uid"]) != item["metadata"]["uid"]:
                return _status(409, "Conflict", "the UID in the patch differs")
            if meta.get("resourceVersion", item["metadata"]["resourceVersion"]) != item["metadata"]["resourceVersion"]:
                return _status(409, "Conflict", "the object has been modified")
            self.patched.append((item["metadata"]["name"], body))
            item["metadata"].setdefault("annotations", {}).update(meta.get("annotations") or {})
        return web.json_response(item)

    def _list(self, plural: str, namespace: str, selector: str) -> web.Response:
        items = [
            item
            for (kind, place, _), item in self.objects.items()
            if kind == plural and namespace in ("", place) and _selected(item, selector.split(",") if selector else ())
        ]
        return web.json_response({"kind": "List", "metadata": {"resourceVersion": "1"}, "items": items})


def _selected(item: Mapping[str, Any], terms: Iterable[str]) -> bool:
    labels = item["metadata"].get("labels") or {}
    for term in terms:
        key, equals, value = term.partition("=")
        if key not in labels or (equals and labels[key] != value.lstrip("=")):
            return False
    return True


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "code": code, "reason": reason, "message": message, "metadata": {}}
    return web.json_response(body, status=code)

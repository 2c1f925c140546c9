"""Checks that no job gets pods under the operator's own ServiceAccount. Pure.

Whoever may create a job gets pods under any ServiceAccount of the job's namespace, as with a Job or a Deployment. The
operator's account has more rights than most people. So jobs in the operator's own namespace are refused. If an
administrator allows them there, no pod of theirs runs under the operator's account.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from elastic_operator.api.spec import Spec
from elastic_operator.manifests.attempt import JobRef, account_of, attempt_name

DEFAULT_ACCOUNT = "default"
"""The account of pods whose template names none, and of all reshard pods without a template."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A ServiceAccount.

    Attributes:
        uid: empty if unknown.
    """

    namespace: str
    name: str
    uid: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Restrictions on all jobs.

    Attributes:
        account: the operator's account; None if it runs with a person's credentials, outside of any namespace.
        allows_own_namespace: True if jobs may be created in the account's namespace.
        lease_name: name of the leader's Lease, in the same namespace.
    """

    account: Account | None = None
    allows_own_namespace: bool = False
    lease_name: str = ""

    def problems(self, job: JobRef, spec: Spec) -> list[str]:
        """Return the reasons why the operator must not run a job; empty for almost every job."""
        own = self.account
        if own is None or job.namespace != own.namespace:
            return []
        if not self.allows_own_namespace:
            problem = (
                f"metadata.namespace: {own.namespace} is the operator's own namespace, where a pod could take the "
                "operator's rights: create the job in another namespace, or let an administrator set "
                "allowJobsInReleaseNamespace (docs/install.md, Rights)"
            )
            return [problem]
        templates = {"spec.template": account_of(spec.template)}
        if spec.reshard.template is not None or own.name == DEFAULT_ACCOUNT:
            templates["spec.reshard.template"] = account_of(spec.reshard.template or {}) or DEFAULT_ACCOUNT
        problems = [
            f"{path}.spec.serviceAccountName: {own.name} is the operator's own ServiceAccount: name another one"
            for path, account in templates.items()
            if account == own.name
        ]
        name_of_attempt = re.compile(re.escape(attempt_name(job.name, 0))[:-1] + r"\d+")
        problems += [
            f"metadata.name: an attempt of {job.name} would be called {name}, which is {kind} of the operator: "
            "name the job otherwise"
            for kind, name in (("the ServiceAccount", own.name), ("the Lease", self.lease_name))
            if name_of_attempt.fullmatch(name)
        ]
        return problems


OPEN = Boundary()
"""No restriction, because the operator has no account in this cluster."""


def account_of_user(username: str, uid: str = "") -> Account | None:
    """Return the ServiceAccount behind a user name of the API server; None for people and nodes."""
    prefix = "system:serviceaccount:"
    namespace, _, name = username.removeprefix(prefix).partition(":")
    return Account(namespace=namespace, name=name, uid=uid) if username.startswith(prefix) and name else None


def account_of_review(review: Mapping[str, Any]) -> Account | None:
    """Return the ServiceAccount in an answered SelfSubjectReview; None for people and nodes."""
    user = (review.get("status") or {}).get("userInfo") or {}
    return account_of_user(str(user.get("username") or ""), str(user.get("uid") or ""))

"""The rules of the resource that the API server checks (CEL), keyed by the path that each rule checks.

`spec_rules` repeats in Python those that need neither the old resource nor its metadata, for resources that were
created before a rule existed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from elastic_operator.api.schema_types import GLOBAL_EXPECTED, GLOBAL_PATTERN
from reshard.contract import Env


class Rule(NamedTuple):
    """One entry of `x-kubernetes-validations`."""

    rule: str
    message: str


def _relative_paths(*names: str) -> dict[str, tuple[Rule, ...]]:
    """Return the rules of fields of spec.checkpoint that hold a path inside the claim."""
    return {
        (path := f"spec.checkpoint.{name}"): (
            Rule(
                "!self.startsWith('/') && !self.split('/').exists(part, part == '..')",
                f"{path} must be relative to the claim and must not contain '..'",
            ),
            Rule(
                "self == '' || self.startsWith('/') || self.matches('^[A-Za-z0-9_.=+@,-]+(/[A-Za-z0-9_.=+@,-]+)*$')",
                f"{path} may hold letters, digits and _ . = + @ , - between single '/', with none at its end: it "
                "becomes part of a command",
            ),
        )
        for name in names
    }


SET_BY_THE_OPERATOR = (
    *(name.value for name in Env if name not in (Env.SCRATCH, Env.MAILBOX)),
    "PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Environment variables of the first training container that the operator overwrites in every attempt."""


_SIZES_OF_TENSORS = ("layers", "hiddenSize", "attentionHeads", "vocabSize", "padVocabulary", "experts")
"""Facts of spec.model that cannot change, besides keyValueHeads. A correction of any other fact is a planned change."""


RULES: Mapping[str, tuple[Rule, ...]] = {
    "": (
        *(
            Rule(
                f"{is_same} || !has(self.status) || (!has(self.status.startedFrom) && !has(self.status.firstStepTime))",
                f"spec.checkpoint.{name} cannot change: the job has started already, and goes on from its own commits; "
                "create a new job to start from another checkpoint",
            )
            for name, is_same in (
                ("startFrom", "self.spec.checkpoint.startFrom == oldSelf.spec.checkpoint.startFrom"),
                (
                    "startOptions",
                    (
                        "has(self.spec.checkpoint.startOptions) == has(oldSelf.spec.checkpoint.startOptions) && "
                        "(!has(self.spec.checkpoint.startOptions) || self.spec.checkpoint.startOptions == "
                        "oldSelf.spec.checkpoint.startOptions)"
                    ),
                ),
            )
        ),
        Rule(
            "size(self.metadata.name) <= 40",
            "metadata.name may have at most 40 characters: names of Jobs, Services and pods are made from it",
        ),
        Rule(
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            (
                "metadata.name must begin with a lower-case letter, end with a letter or digit, and hold only "
                "lower-case letters, digits and '-': it becomes a DNS name (RFC 1035)"
            ),
        ),
    ),
    "spec": (
        Rule(
            "!has(oldSelf.model) || has(self.model)",
            "spec.model cannot be removed: the checkpoints hold this model; create a new job for another one",
        ),
        *(
            Rule(
                f"!has(oldSelf.model) || !has(self.model) || self.model.{name} == oldSelf.model.{name}",
                f"spec.model.{name} cannot change: the checkpoints hold tensors of these sizes; create a new job for "
                "another model",
            )
            for name in _SIZES_OF_TENSORS
        ),
        Rule(
            (
                "!has(oldSelf.model) || !has(self.model) || "
                "(has(self.model.keyValueHeads) ? self.model.keyValueHeads : self.model.attentionHeads) == "
                "(has(oldSelf.model.keyValueHeads) ? oldSelf.model.keyValueHeads : oldSelf.model.attentionHeads)"
            ),
            (
                "spec.model.keyValueHeads cannot change: the checkpoints hold tensors of these sizes; create a new job "
                "for another model"
            ),
        ),
        Rule(
            (
                "has(self.managedBy) == has(oldSelf.managedBy) && (!has(self.managedBy) || self.managedBy == "
                "oldSelf.managedBy)"
            ),
            "spec.managedBy cannot change: two controllers would act on the job; create a new job",
        ),
        Rule(
            "self.accelerator.resource == oldSelf.accelerator.resource",
            "spec.accelerator.resource cannot change: create a new job for another kind of accelerator",
        ),
        Rule(
            (
                "self.parallelism.strategy != 'Auto' || self.parallelism.tensor.exists(t, "
                "self.accelerator.perNode.exists(n, n % t == 0))"
            ),
            (
                "spec.parallelism.tensor: no degree divides a number of spec.accelerator.perNode, and a tensor "
                "parallel group cannot span nodes: add a smaller degree, for instance 1"
            ),
        ),
        Rule(
            (
                "self.parallelism.strategy != 'Auto' || self.parallelism.tensor.min() * "
                "self.parallelism.pipeline.min() <= self.nodes.max * self.accelerator.perNode.max()"
            ),
            (
                "spec.parallelism: the smallest tensor times the smallest pipeline is more than all accelerators "
                "(spec.nodes.max times the largest perNode), so the job could never run"
            ),
        ),
        Rule(
            (
                "self.parallelism.strategy != 'Auto' || self.nodes.min * self.accelerator.perNode.min() <= "
                "self.parallelism.tensor.max() * self.parallelism.pipeline.max() * self.parallelism.context.max() * "
                "(self.batch.globalSamples / self.batch.microSamples)"
            ),
            (
                "spec.batch.globalSamples is too small for spec.nodes.min: even at the highest degrees there are more "
                "data-parallel replicas than micro-batches; lower nodes.min or microSamples"
            ),
        ),
        Rule(
            (
                "self.parallelism.strategy == 'Auto' || !has(self.parallelism.topologies) || "
                "self.parallelism.topologies.exists(x, self.accelerator.perNode.exists(n, n % x.tensor == 0 && "
                "x.tensor "
                "* x.pipeline <= n * self.nodes.max && (!has(x.data) || ((x.tensor * x.pipeline * x.data) % n == 0 && "
                "x.tensor * x.pipeline * x.data >= n * self.nodes.min && x.tensor * x.pipeline * x.data <= n * "
                "self.nodes.max))))"
            ),
            (
                "spec.parallelism.topologies: none can run: tensor must divide a number of spec.accelerator.perNode, "
                "and tensor * pipeline * data must be perNode times a number of nodes from spec.nodes.min to max"
            ),
        ),
        Rule(
            (
                "self.parallelism.strategy == 'Auto' || !has(self.parallelism.topologies) || "
                "self.parallelism.topologies.exists(x, !has(x.data) || x.data < x.context || self.batch.globalSamples "
                "% (x.data / x.context * self.batch.microSamples) == 0)"
            ),
            (
                "spec.batch.globalSamples is not a multiple of microSamples * data / context for any entry of "
                "spec.parallelism.topologies"
            ),
        ),
        Rule(
            (
                "!has(self.model) || self.parallelism.strategy != 'Auto' || self.parallelism.tensor.exists(t, "
                "self.model.attentionHeads % t == 0 && self.model.hiddenSize % t == 0 && "
                "(!has(self.model.keyValueHeads) "
                "|| self.model.keyValueHeads % t == 0) && (self.model.padVocabulary || self.model.vocabSize % t == 0))"
            ),
            (
                "spec.parallelism.tensor: no degree divides attentionHeads, keyValueHeads and hiddenSize of spec.model "
                "(and vocabSize, if padVocabulary is false)"
            ),
        ),
        Rule(
            (
                "!has(self.model) || self.parallelism.strategy != 'Auto' || self.parallelism.pipeline.min() <= "
                "self.model.layers"
            ),
            "spec.parallelism.pipeline: every number of stages is above spec.model.layers",
        ),
        Rule(
            (
                "!has(self.model) || self.parallelism.strategy != 'Auto' || self.parallelism.expert.exists(e, e == 1 "
                "|| (self.model.experts > 0 && self.model.experts % e == 0))"
            ),
            "spec.parallelism.expert: no degree divides spec.model.experts (a dense model has none): add 1",
        ),
        Rule(
            (
                "!has(self.model) || self.parallelism.strategy != 'Auto' || self.parallelism.context.exists(c, "
                "self.model.sequenceLength % c == 0)"
            ),
            "spec.parallelism.context: no degree divides spec.model.sequenceLength",
        ),
        Rule(
            (
                "!self.template.spec.containers[?0].?resources.?limits[?self.accelerator.resource].hasValue() || "
                "self.accelerator.perNode.exists(n, n == "
                "int(self.template.spec.containers[0].resources.limits[self.accelerator.resource]))"
            ),
            (
                "spec.template: resources.limits of the first container ask for a number of spec.accelerator.resource "
                "that spec.accelerator.perNode does not list: leave it out, the operator fills it in"
            ),
        ),
        Rule(
            (
                "!self.template.spec.containers[?0].?resources.?requests[?self.accelerator.resource].hasValue() || "
                "self.accelerator.perNode.exists(n, n == "
                "int(self.template.spec.containers[0].resources.requests[self.accelerator.resource]))"
            ),
            (
                "spec.template: resources.requests of the first container ask for a number of "
                "spec.accelerator.resource that spec.accelerator.perNode does not list: leave it out, the operator "
                "fills it in"
            ),
        ),
        Rule(
            (
                "self.template.spec.containers.all(c, c.name == self.template.spec.containers[0].name || "
                "!c.?resources.?limits[?self.accelerator.resource].hasValue())"
            ),
            (
                "spec.template: only the first container may ask for spec.accelerator.resource: it trains, and gets as "
                "many as spec.accelerator.perNode says"
            ),
        ),
        Rule(
            (
                "!has(self.template.spec.initContainers) || !self.template.spec.initContainers.exists(c, "
                "c.?resources.?limits[?self.accelerator.resource].hasValue())"
            ),
            (
                "spec.template: an init container asks for spec.accelerator.resource: only the first container may, it "
                "gets as many as spec.accelerator.perNode says"
            ),
        ),
        Rule(
            "self.reshard.mode != 'Virtual' || self.reshard.parallelism == 1",
            "spec.reshard.parallelism is not for mode Virtual, which moves no bytes that pods could share: leave "
            "it out",
        ),
        Rule(
            "self.reshard.mode != 'Load' || self.checkpoint.format == 'DCP'",
            "spec.reshard.mode Load is only for spec.checkpoint.format DCP: checkpoints of other formats cannot be "
            "loaded in another topology",
        ),
        Rule(
            "self.reshard.mode != 'Virtual' || self.checkpoint.format != 'DCP'",
            "spec.reshard.mode Virtual is not for spec.checkpoint.format DCP, of which a rank may open any file: "
            "choose Auto, Load or Materialize",
        ),
        Rule(
            "!has(self.reshard.resources) || !has(self.reshard.template)",
            "spec.reshard.resources is not for a template: set the resources in spec.reshard.template",
        ),
        Rule(
            "!self.reshard.?resources.?limits[?self.accelerator.resource].hasValue()",
            "spec.reshard.resources asks for spec.accelerator.resource: resharding runs on CPUs",
        ),
        Rule(
            (
                "!has(self.reshard.template) || !self.reshard.template.spec.containers.exists(c, "
                "c.?resources.?limits[?self.accelerator.resource].hasValue())"
            ),
            "spec.reshard.template: a container asks for spec.accelerator.resource: resharding runs on CPUs",
        ),
        Rule(
            (
                "!has(self.parallelism.zeroStage) || self.parallelism.zeroStage <= 1 || self.parallelism.strategy != "
                "'Auto' || self.checkpoint.format == 'DCP' || self.parallelism.pipeline.exists(p, p == 1)"
            ),
            (
                "spec.parallelism: zeroStage 2 or 3 cannot run with a pipeline, and pipeline does not list 1: add 1 to "
                "pipeline or choose zeroStage 0 or 1"
            ),
        ),
        Rule(
            (
                "self.checkpoint.format == 'DCP' || !has(self.parallelism.topologies) || "
                "self.parallelism.topologies.all(x, !has(x.zeroStage) || x.zeroStage <= 1 || x.pipeline == 1)"
            ),
            "spec.parallelism.topologies: zeroStage 2 or 3 cannot run with a pipeline",
        ),
    ),
    "spec.managedBy": (
        Rule(
            (
                "self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/"
                "[A-Za-z0-9/%:@._~!$&()*+,;=-]+$')"
            ),
            "spec.managedBy must be a name with its domain, for instance kueue.x-k8s.io/multikueue",
        ),
    ),
    "spec.accelerator.resource": (
        Rule(
            "self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$')",
            (
                "spec.accelerator.resource must be an extended resource with its domain, for instance amd.com/gpu or "
                "nvidia.com/gpu"
            ),
        ),
        Rule(
            "!self.matches('^([^/]*[.])?kubernetes[.]io/')",
            (
                "spec.accelerator.resource: the domain kubernetes.io belongs to Kubernetes; device plugins offer "
                "resources such as amd.com/gpu or nvidia.com/gpu"
            ),
        ),
    ),
    "spec.nodes": (
        Rule(
            "self.min <= self.max",
            "spec.nodes: min must not be above max",
        ),
        Rule(
            "!has(self.preferred) || (self.preferred >= self.min && self.preferred <= self.max)",
            "spec.nodes.preferred must lie between min and max",
        ),
        Rule(
            "!has(self.preferred) || !has(self.allowed) || self.preferred in self.allowed",
            "spec.nodes.preferred must be one of allowed",
        ),
        Rule(
            "!has(self.allowed) || self.allowed.exists(n, n >= self.min && n <= self.max)",
            "spec.nodes.allowed: none of the numbers lies between min and max, so the job could never run",
        ),
    ),
    "spec.parallelism": (
        Rule(
            "self.strategy == 'Auto' || has(self.topologies)",
            "spec.parallelism: strategy Fixed or Ranked needs topologies",
        ),
        Rule(
            "self.strategy != 'Auto' || !has(self.topologies)",
            (
                "spec.parallelism: topologies is only for strategy Fixed or Ranked; with Auto list the degrees in "
                "tensor, pipeline, expert and context"
            ),
        ),
        Rule(
            "self.strategy != 'Fixed' || !has(self.topologies) || size(self.topologies) == 1",
            (
                "spec.parallelism: strategy Fixed takes exactly one entry in topologies; for several in order of "
                "preference use Ranked"
            ),
        ),
    ),
    "spec.parallelism.topologies[]": (
        Rule(
            "!has(self.data) || self.data % (self.expert * self.context) == 0",
            "spec.parallelism.topologies: data must be a multiple of expert * context, which divide it",
        ),
    ),
    "spec.batch": (
        Rule(
            "self.globalSamples % self.microSamples == 0",
            "spec.batch.globalSamples must be a multiple of microSamples",
        ),
    ),
    "spec.model": (
        Rule(
            "!has(self.keyValueHeads) || self.attentionHeads % self.keyValueHeads == 0",
            "spec.model: keyValueHeads must divide attentionHeads",
        ),
        Rule(
            "self.expertParameters <= self.parameters",
            "spec.model: expertParameters is part of parameters and cannot be above it",
        ),
        Rule(
            "self.expertParameters == 0.0 || self.experts > 0",
            "spec.model: expertParameters needs experts",
        ),
        Rule(
            "self.experts == 0 || self.expertsPerToken <= self.experts",
            "spec.model: expertsPerToken cannot be above experts",
        ),
    ),
    "spec.checkpoint": (
        Rule(
            "self.claimName == oldSelf.claimName && self.path == oldSelf.path && self.format == oldSelf.format",
            "spec.checkpoint: claimName, path and format cannot change: the job would lose its checkpoints",
        ),
        Rule(
            "oldSelf.takeOver == 'Never' || self.takeOver != 'Never'",
            "spec.checkpoint.takeOver cannot be withdrawn: the folder has had another owner from then on",
        ),
        Rule(
            "self.takeOver != 'Resume' || self.startFrom == ''",
            "spec.checkpoint: takeOver Resume goes on from the newest commit in path, so startFrom must be empty",
        ),
        Rule(
            (
                "self.startFrom == '' || (self.startFrom != self.path && !(self.path == '' ? self.startFrom : "
                "(self.startFrom.startsWith(self.path + '/') ? self.startFrom.substring(size(self.path) + 1) : "
                "'')).matches('^a[0-9]+(/|$)'))"
            ),
            (
                "spec.checkpoint.startFrom lies where this job writes its own attempts (spec.checkpoint.path): choose "
                "another path, so that it does not write over what it starts from"
            ),
        ),
        Rule(
            (
                "!has(self.startOptions) || self.startFrom != '' || (self.startOptions.patterns == '' && "
                "self.startOptions.names == '' && self.startOptions.like == '')"
            ),
            (
                "spec.checkpoint.startOptions says how to read startFrom, which is empty: name the checkpoint to start "
                "from, or leave startOptions out"
            ),
        ),
    ),
    "spec.checkpoint.claimName": (
        Rule(
            "self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')",
            "spec.checkpoint.claimName must be the name of a PersistentVolumeClaim: lower-case letters, digits, "
            "'-' and '.'",
        ),
    ),
    "spec.checkpoint.resumeFrom": (
        Rule(
            "self in ['', 'Beginning'] || self.matches('^a[0-9]{1,9}/step-[A-Za-z0-9._-]{1,64}$')",
            "spec.checkpoint.resumeFrom must be Beginning, or a commit in status.checkpoint.history: a2/step-00000005",
        ),
    ),
    **_relative_paths("path", "startFrom", *(f"startOptions.{name}" for name in ("patterns", "names", "like"))),
    "spec.checkpoint.allowedGlobals[]": (
        Rule(f"self.matches('^{GLOBAL_PATTERN}$')", f"spec.checkpoint.allowedGlobals: expected {GLOBAL_EXPECTED}"),
    ),
    "spec.reshard.template.spec": (
        Rule(
            "!has(self.restartPolicy) || self.restartPolicy == 'Never'",
            "spec.reshard.template.spec.restartPolicy must be Never or absent: the operator retries a conversion "
            "itself",
        ),
    ),
    "spec.template.spec": (
        Rule(
            "!has(self.restartPolicy) || self.restartPolicy == 'Never'",
            (
                "spec.template.spec.restartPolicy must be Never or absent: one rank that restarts alone would "
                "block all others; the operator restarts them together"
            ),
        ),
        Rule(
            "!has(self.activeDeadlineSeconds)",
            (
                "spec.template.spec.activeDeadlineSeconds would kill every attempt after that time and spend the "
                "restart budget: leave it out, and set spec.activeDeadlineSeconds for the whole job"
            ),
        ),
        Rule(
            (
                "!has(self.hostNetwork) || !self.hostNetwork || (has(self.dnsPolicy) && self.dnsPolicy == "
                "'ClusterFirstWithHostNet')"
            ),
            (
                "spec.template.spec.hostNetwork needs dnsPolicy ClusterFirstWithHostNet: without it the ranks cannot "
                "find rank 0 by its name"
            ),
        ),
        Rule(
            "!has(self.nodeName)",
            "spec.template.spec.nodeName would put all pods on one node: use nodeSelector or affinity",
        ),
        Rule(
            "!has(self.hostname) && !has(self.subdomain)",
            (
                "spec.template.spec.hostname and subdomain are set by the operator, so that the ranks find each other: "
                "leave them out"
            ),
        ),
        Rule(
            (
                "!self.containers[?0].?env.hasValue() || !self.containers[0].env.exists(e, e.name in "
                f"{list(SET_BY_THE_OPERATOR)})"
            ),
            (
                "spec.template: the first container sets a variable that the operator sets for every attempt (ETJ_*, "
                "PET_*, MASTER_ADDR, MASTER_PORT): leave it out; a value of yours would be ignored"
            ),
        ),
    ),
}

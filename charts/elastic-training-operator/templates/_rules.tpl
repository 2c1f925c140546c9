{{/*
All rights of the operator. tests/operator_rights.py lists each verb with the reason for it; a test compares both, and
another one the requests that the operator makes.
*/}}

{{/* What the operator does in the namespaces of the jobs. */}}
{{- define "etj.jobRules" -}}
# The resource: read it, write its status, delete it when spec.ttlSecondsAfterFinished has passed.
- apiGroups: [elastictraining.dev]
  resources: [elastictrainingjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [elastictraining.dev]
  resources: [elastictrainingjobs/status]
  verbs: [update]
# ownerReferences with blockOwnerDeletion need this where OwnerReferencesPermissionEnforcement is on.
- apiGroups: [elastictraining.dev]
  resources: [elastictrainingjobs/finalizers]
  verbs: [update]
# The specs that jobs go on with while an edit is refused.
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [get, list, create, delete]
# What one attempt consists of. `get`: whose an object is that has the name of one of these is looked up before it is
# deleted, and where it is in the way.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, create, delete]
# Lets an eviction wait until the training has committed.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, delete]
# Quota from Kueue, for jobs in a queue. `get`: whose a Workload is that has the name of one of these.
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [patch]
# Heartbeats of the attempts. The operator hands get and patch on to them, so it has to hold them.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, create, delete]
# Pods are made by the Job controller; the operator reads them and deletes those of stopped attempts.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
# Whether the claims of the pods are bound, and to which volumes.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, create, patch]
{{- end -}}

{{/* The same where jobs may have spec.gang. The kind is another one in each group. */}}
{{- define "etj.gangRules" -}}
- apiGroups: [scheduling.k8s.io, scheduling.x-k8s.io, scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [get, create, delete]
{{- end -}}

{{/* What it has to read outside of them. */}}
{{- define "etj.clusterRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
# Which of the jobs that wait for nodes takes them first.
- apiGroups: [scheduling.k8s.io]
  resources: [priorityclasses]
  verbs: [list]
# From which nodes the volumes of jobs can be reached.
- apiGroups: [""]
  resources: [persistentvolumes]
  verbs: [get]
- apiGroups: [storage.k8s.io]
  resources: [storageclasses]
  verbs: [get]
# Finds out when the ElasticTrainingJob kind comes, goes or changes.
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [list, watch]
# Where Kueue has placed an admitted job, and what its priority is worth.
- apiGroups: [kueue.x-k8s.io]
  resources: [resourceflavors, workloadpriorityclasses]
  verbs: [get]
{{- end -}}

{{/* The same where only some namespaces are served. */}}
{{- define "etj.servedRules" -}}
# Which accelerators are in use, by whomever.
- apiGroups: [""]
  resources: [pods]
  verbs: [list]
# Whether the watched namespaces are there.
- apiGroups: [""]
  resources: [namespaces]
  verbs: [list, watch]
{{- end -}}

{{/* The heartbeats of the kubelets, in kube-node-lease. */}}
{{- define "etj.nodeLeaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [list]
{{- end -}}

{{/*
Leader election, in the release's namespace. `delete` is asked for by OwnerReferencesPermissionEnforcement, where that
is on, of whoever sets the Lease's owner.
*/}}
{{- define "etj.leaderRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "etj.fullname" . }}]
  verbs: [get, update, delete]
{{- end -}}

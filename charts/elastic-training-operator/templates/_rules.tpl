{{/* What the operator does in the namespaces of the jobs. */}}
{{- define "etj.jobRules" -}}
# The resource: read it, write its status.
- apiGroups: [elastictraining.dev]
  resources: [elastictrainingjobs]
  verbs: [get, list, watch]
- apiGroups: [elastictraining.dev]
  resources: [elastictrainingjobs/status]
  verbs: [get, update]
# ownerReferences with blockOwnerDeletion need this where OwnerReferencesPermissionEnforcement is on.
- apiGroups: [elastictraining.dev]
  resources: [elastictrainingjobs/finalizers]
  verbs: [update]
# The specs that jobs go on with while an edit is refused.
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [list, create, delete]
# What one attempt consists of.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [create, delete]
# Heartbeats of the attempts. The operator hands get, update and patch on to them, so it has to hold them.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [create, delete]
# Pods are made by the Job controller; the operator reads them and deletes those of stopped attempts.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, create, patch]
{{- end -}}

{{/* What it has to read outside of them. */}}
{{- define "etj.clusterRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [get, list, watch]
# Finds out when the ElasticTrainingJob kind comes, goes or changes.
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [list, watch]
{{- end -}}

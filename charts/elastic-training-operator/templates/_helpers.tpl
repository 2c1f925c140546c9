{{/* Name of the chart in labels. */}}
{{- define "etj.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Name of all namespaced objects of this release; the release's name where that says enough. */}}
{{- define "etj.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "etj.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "etj.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Name of objects outside of the release's namespace: two releases of one name may live in two namespaces. */}}
{{- define "etj.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "etj.fullname" .) -}}
{{- end -}}

{{- define "etj.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "etj.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name: expected the name of an existing ServiceAccount, as serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "etj.selectorLabels" -}}
app.kubernetes.io/name: {{ include "etj.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "etj.labels" -}}
{{ include "etj.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* repository:tag, or repository@digest where the tag is a digest. */}}
{{- define "etj.image" -}}
{{- $tag := .image.tag | default .default -}}
{{- .image.repository -}}{{ if hasPrefix "sha256:" $tag }}@{{ else }}:{{ end }}{{ $tag }}
{{- end -}}

{{/* The subject of every binding. */}}
{{- define "etj.subjects" -}}
- kind: ServiceAccount
  name: {{ include "etj.serviceAccountName" . }}
  namespace: {{ .Release.Namespace }}
{{- end -}}

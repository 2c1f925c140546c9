{{/* The command line of the operator. Every key of `settings` is an option: fooSeconds is --foo-seconds. */}}
{{- define "etj.arguments" -}}
- run
{{- if .Values.jsonLogs }}
- --json-logs
{{- end }}
- --log-level={{ .Values.logLevel }}
- --lease-name={{ include "etj.fullname" . }}
- --health-port={{ .Values.health.port }}
{{- if .Values.metrics.enabled }}
- --metrics-port={{ .Values.metrics.port }}
{{- end }}
{{- if .Values.statusPage.enabled }}
- --status-page-port={{ .Values.statusPage.port }}
{{- end }}
{{- if .Values.allowJobsInReleaseNamespace }}
- --allow-jobs-in-own-namespace
{{- else if has .Release.Namespace .Values.watchNamespaces }}
{{- fail (printf "watchNamespaces: expected other namespaces than the release's own, found %s: jobs there could take the operator's rights; install the release elsewhere, or set allowJobsInReleaseNamespace" .Release.Namespace) }}
{{- end }}
{{- range .Values.watchNamespaces | uniq }}
- --namespace={{ . }}
{{- end }}
{{- if .Values.reshardImage.repository }}
- --reshard-image={{ include "etj.image" (dict "image" .Values.reshardImage "default" .Chart.AppVersion) }}
- --reshard-image-pull-policy={{ .Values.reshardImage.pullPolicy }}
{{- end }}
{{- with .Values.notifications }}
{{- if .secretName }}
- --notification-format={{ .format }}
{{- with .kinds }}
- --notification-kinds={{ join "," . }}
{{- end }}
{{- with .source }}
- {{ printf "--notification-source=%s" . | quote }}
{{- end }}
{{- if .allowHttp }}
- --notification-allow-http
{{- end }}
{{- end }}
{{- end }}
{{- range $key, $value := .Values.settings }}
{{- $option := kebabcase $key }}
{{- if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%s" $option . | quote }}
{{- end }}
{{- else if not (kindIs "invalid" $value) }}
- --{{ $option }}={{ $value }}
{{- end }}
{{- end }}
{{- end -}}

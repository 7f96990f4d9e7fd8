{{/* The name that all objects begin with. */}}
{{- define "drover.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $base := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- printf "%s-operator" ($base | trunc 40 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "drover.serviceAccount" -}}
{{- default (.Values.serviceAccount.create | ternary (include "drover.fullname" .) "default") .Values.serviceAccount.name -}}
{{- end -}}

{{/* What picks the operator's pod. The operator's NetworkPolicies for workers let the component "operator" in. */}}
{{- define "drover.selector" -}}
app.kubernetes.io/name: drover
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "drover.labels" -}}
{{ include "drover.common" . }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "drover.common" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: drover
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* An image: (list values-of-the-image chart). */}}
{{- define "drover.image" -}}
{{- $image := index . 0 -}}
{{- $chart := index . 1 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default $chart.AppVersion $image.tag }}
{{- end -}}
{{- end -}}

{{/* What the `restricted` Pod Security level asks of a pod, and of a container. */}}
{{- define "drover.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.runAsUser }}
runAsUser: {{ int64 . }}
runAsGroup: {{ int64 . }}
fsGroup: {{ int64 . }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "drover.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The operator's rules: the table at the head of operator/drover_operator/cluster.py, row by row; a test compares. */}}
{{- define "drover.rules" -}}
- apiGroups: [drover.dev]
  resources: [inferenceclusters]
  verbs: [get, list, watch]
- apiGroups: [drover.dev]
  resources: [inferenceclusters/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [statefulsets, deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps, persistentvolumeclaims]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}

{{/* How figures are read, of the values serviceMonitor or podMonitor. */}}
{{- define "drover.endpoint" -}}
path: /metrics
interval: {{ .interval }}
scrapeTimeout: {{ .scrapeTimeout }}
{{- end -}}

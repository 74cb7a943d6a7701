{{- define "kvlane.probeScheme" -}}
{{- if .Values.tls.secretName }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}

{{/* A container without privileges, for Pod Security's level "restricted". */}}
{{- define "kvlane.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "kvlane.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
# A snapshot volume may hold gigabytes: change its owner once, not at each start.
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvlane.spread" -}}
{{- $root := index . 0 }}{{ $component := index . 1 -}}
{{- range $i, $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}{{ if $i }}
{{ end }}- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: {{ $root.Values.topologySpread.whenUnsatisfiable }}
  labelSelector:
    matchLabels: {{- include "kvlane.selectorLabels" $root | nindent 6 }}
      app.kubernetes.io/component: {{ $component }}
  matchLabelKeys: [{{ if and (eq $component (include "kvlane.component" $root)) (eq $root.Values.snapshots.medium "persistent") }}controller-revision-hash{{ else }}pod-template-hash{{ end }}]
{{- end }}
{{- end }}

{{- define "kvlane.pod" -}}
{{- $v := .Values -}}
metadata:
  labels: {{- include "kvlane.labels" . | nindent 4 }}
    app.kubernetes.io/component: {{ include "kvlane.component" . }}
    {{- with $v.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    checksum/needs-restart: {{ include "kvlane.restartConfig" . | sha256sum }}
    {{- with $v.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  serviceAccountName: {{ include "kvlane.serviceAccountName" . }}
  automountServiceAccountToken: {{ ternary "true" "false" (ne (include "kvlane.needsToken" .) "") }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add $v.shutdown.delaySeconds $v.shutdown.graceSeconds 10 }}
  securityContext: {{- include "kvlane.podSecurity" . | nindent 4 }}
  {{- with $v.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  containers:
    - name: kvlane
      image: {{ include "kvlane.ownImage" . }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      args: [{{ if eq $v.mode "gateway" }}serve{{ else }}epp{{ end }}, --config, /etc/kvlane/config/config.yaml]
      {{- with $v.extraEnv }}
      env: {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        {{- if eq $v.mode "gateway" }}
        - {name: http, containerPort: 30000}
        {{- else }}
        - {name: grpc-ext-proc, containerPort: 9002}
        - {name: grpc-health, containerPort: 9003}
        {{- end }}
        - {name: http-operators, containerPort: 29000}
        {{- if include "kvlane.exchanges" . }}
        - {name: replicas, containerPort: {{ $v.exchange.port }}}
        {{- end }}
      {{- /* Startup waits for snapshots to be read. Liveness is slow to act: a restart loses requests. */}}
      startupProbe:
        httpGet: {path: /liveness, port: http-operators, scheme: {{ include "kvlane.probeScheme" . }}}
        periodSeconds: 1
        failureThreshold: 60
      livenessProbe:
        httpGet: {path: /liveness, port: http-operators, scheme: {{ include "kvlane.probeScheme" . }}}
        periodSeconds: 10
        timeoutSeconds: 3
        failureThreshold: 6
      readinessProbe:
        {{- if eq $v.mode "gateway" }}
        httpGet: {path: /readiness, port: http, scheme: {{ include "kvlane.probeScheme" . }}}
        {{- else }}
        grpc: {port: 9003, service: readiness}
        {{- end }}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 2
      resources: {{- toYaml $v.resources | nindent 8 }}
      securityContext: {{- include "kvlane.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/kvlane/config, readOnly: true}
        - {name: keys, mountPath: /etc/kvlane/keys, readOnly: true}
        {{- if or $v.tls.secretName (eq $v.picker.tls.mode "secret") }}
        - {name: tls, mountPath: /etc/kvlane/tls, readOnly: true}
        {{- end }}
        {{- if include "kvlane.exchangeSecret" . }}
        - {name: replicas-tls, mountPath: /etc/kvlane/replicas, readOnly: true}
        {{- end }}
        {{- if $v.auth.tenantSaltSecret }}
        - {name: salt, mountPath: /etc/kvlane/salt, readOnly: true}
        {{- end }}
        {{- if ne $v.snapshots.medium "none" }}
        - {name: state, mountPath: /var/lib/kvlane}
        {{- end }}
        {{- if $v.tokenizer.volume }}
        - {name: tokenizer, mountPath: {{ $v.tokenizer.mountPath }}, readOnly: true}
        {{- end }}
        {{- with $v.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
  volumes:
    # A whole directory: kubelet replaces the file when the ConfigMap changes, and kvlane reloads it.
    - name: config
      configMap: {name: {{ include "kvlane.fullname" . }}}
    - name: keys
      secret:
        secretName: {{ include "kvlane.keysSecret" . }}
        items: [{key: keys, path: keys}]
        defaultMode: 0440
    {{- with default (ternary $v.picker.tls.secretName "" (eq $v.picker.tls.mode "secret")) $v.tls.secretName }}
    - name: tls
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- with include "kvlane.exchangeSecret" . }}
    - name: replicas-tls
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- with $v.auth.tenantSaltSecret }}
    - name: salt
      secret: {secretName: {{ . }}, items: [{key: key, path: key}], defaultMode: 0440}
    {{- end }}
    {{- if eq $v.snapshots.medium "emptyDir" }}
    - name: state
      emptyDir: {sizeLimit: {{ $v.snapshots.size }}}
    {{- end }}
    {{- with $v.tokenizer.volume }}
    - name: tokenizer
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $v.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- if $v.topologySpread.enabled }}
  topologySpreadConstraints: {{- include "kvlane.spread" (list . (include "kvlane.component" .)) | nindent 4 }}
  {{- end }}
  {{- with $v.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

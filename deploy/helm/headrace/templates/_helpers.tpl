{{/* Labels of a service's objects. Takes a dict of root and name. */}}
{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- define "headrace.port" -}}
{{ get (dict "buffer" 7001 "reward" 7002 "rollout" 7003 "trainer" 7004) . }}
{{- end }}

{{/* Every rollout service is a place of its own in rollout_address: the trainer publishes to all of them. */}}
{{- define "headrace.rolloutAddress" -}}
{{- $release := .Release.Name -}}
{{- $places := list -}}
{{- range $number := until (int .Values.rollout.replicas) -}}
{{- $places = append $places (printf "%s-rollout-%d.%s-rollout:7003" $release $number $release) -}}
{{- end -}}
{{ join "," $places }}
{{- end }}

{{/* What every pod template has: metadata and spec, but for restartPolicy. Takes a dict of root and name. */}}
{{- define "headrace.pod" -}}
{{- $values := index .root.Values .name -}}
{{- $release := .root.Release.Name -}}
{{- $port := include "headrace.port" .name -}}
metadata:
  labels:
    {{- include "headrace.labels" . | nindent 4 }}
  annotations:
    # Pods that read a job of their own start again when it changes.
    checksum/job: {{ .root.Values.job | sha256sum }}
spec:
  # Kubernetes would add variables HEADRACE_…, which are no options of a job, where a release is called headrace.
  enableServiceLinks: false
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .name }}
      image: {{ with .root.Values.image.registry }}{{ . }}/{{ end }}headrace-{{ .name }}:{{ .root.Values.image.tag }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      args: [{{ .name }}, --config, /job/job.toml]
      workingDir: /job
      env:
        {{- include "headrace.env" . | nindent 8 }}
      ports:
        - {name: grpc, containerPort: {{ $port }}}
        - {name: metrics, containerPort: {{ .root.Values.metrics.port }}}
      {{- if eq .name "reward" }}
      # So long nobody is sent here any more, and who is here is answered.
      lifecycle:
        preStop:
          exec:
            command: [sleep, "5"]
      {{- end }}
      # No liveness: headrace up starts its service again by itself, and health says NOT_SERVING for reasons that another
      # start makes worse (engines that load, a database that is away). A gRPC probe has no certificate to show: exec has.
      startupProbe:
        exec:
          command: [python, -m, headrace.launch.health, "127.0.0.1:{{ $port }}"]
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 190
      readinessProbe:
        exec:
          command: [python, -m, headrace.launch.health, "127.0.0.1:{{ $port }}"]
        periodSeconds: 15
        timeoutSeconds: 10
        failureThreshold: 2
      resources:
        {{- include "headrace.resources" $values | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
      volumeMounts:
        - {name: run, mountPath: /var/lib/headrace}
        - {name: tmp, mountPath: /tmp}
        - {name: shared-memory, mountPath: /dev/shm}
        - {name: job, mountPath: /job/job.toml, subPath: job.toml, readOnly: true}
        {{- if .root.Values.tls.secretName }}
        - {name: tls, mountPath: /tls, readOnly: true}
        {{- end }}
        {{- with .root.Values.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: shared-memory
      emptyDir:
        medium: Memory
        sizeLimit: {{ $values.sharedMemory }}
    - name: job
      configMap:
        name: {{ $release }}-job
    {{- if eq .name "reward" }}
    - name: run
      emptyDir: {}
    {{- end }}
    {{- if eq .name "trainer" }}
    - name: run
      persistentVolumeClaim:
        claimName: {{ $release }}-trainer
    {{- end }}
    {{- with .root.Values.tls.secretName }}
    - name: tls
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- with .root.Values.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "headrace.env" -}}
{{- $release := .root.Release.Name -}}
- {name: HEADRACE_RUN_DIR, value: /var/lib/headrace}
- {name: HEADRACE_LISTEN_HOST, value: "0.0.0.0"}
- {name: HEADRACE_BUFFER_ADDRESS, value: "{{ $release }}-buffer:7001"}
- {name: HEADRACE_REWARD_ADDRESS, value: "{{ $release }}-reward:7002"}
- {name: HEADRACE_ROLLOUT_ADDRESS, value: {{ include "headrace.rolloutAddress" .root | quote }}}
- {name: HEADRACE_TRAINER_ADDRESS, value: "{{ $release }}-trainer:7004"}
- {name: HEADRACE_METRICS_PORT, value: {{ .root.Values.metrics.port | quote }}}
{{- if .root.Values.tls.secretName }}
- {name: HEADRACE_TLS_DIR, value: /tls}
{{- else if .root.Values.insecure }}
- {name: HEADRACE_INSECURE, value: "true"}
{{- else }}
{{- fail "tls.secretName is empty: make certificates with `headrace certs`, a secret of ca.pem, cert.pem and key.pem, and name it; or set insecure on a network that nobody else is in" }}
{{- end }}
{{- if and (eq .name "rollout") (gt (int .root.Values.rollout.replicas) 1) }}
- name: HEADRACE_ROLLOUT_SERVICE
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['apps.kubernetes.io/pod-index']
{{- end }}
{{- if and (eq .name "trainer") .root.Values.wandb.secretName }}
- name: WANDB_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.wandb.secretName }}
      key: {{ .root.Values.wandb.key }}
{{- end }}
{{- if and (eq .name "buffer") .root.Values.postgres.secretName }}
- name: PGPASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.postgres.secretName }}
      key: {{ .root.Values.postgres.key }}
{{- end }}
{{- with .root.Values.env }}
{{ toYaml . }}
{{- end }}
{{- with (index .root.Values .name).env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "headrace.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .gpus -}}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict "nvidia.com/gpu" .gpus)) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end }}

{{/* A claim's spec, of a service's storage. */}}
{{- define "headrace.claim" -}}
accessModes: [ReadWriteOnce]
{{- with .storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ .size }}
{{- end }}

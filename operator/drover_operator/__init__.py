"""Drover's control plane: the Kubernetes operator that turns an InferenceCluster into worker and coordinator pods.

Of the data plane it may import `drover.spec`, `plan`, `errors`, `logs` and `sizes`, and nothing that computes. Its
modules are designed in docs/architecture.md section 2 and not written yet.
"""

"""Drover's control plane: the Kubernetes operator that turns an InferenceCluster into worker and coordinator pods.

Reading order: `reconcile` is one cycle, top to bottom, and names all that it uses: `target` (what is asked for),
`observed` with `troubles` (what is there), `layout` (shares of the workers), `progress` with `forecast` (what is next),
`desired` with `pods` and `overrides` (what ought to be there), `managed` (does it differ?), `status` (what is said
about it). These are pure. The doors are `cluster` (the API server), `probe` (workers), `handlers` (what is watched,
over `work_queue`), `metrics` and `__main__`. `crd` and `crd_status` make the CustomResourceDefinition.

Of the data plane it imports `drover.spec`, `spec_file`, `plan`, `errors`, `logs`, `sizes`, and `rpc` in `probe`;
nothing that computes.
"""
